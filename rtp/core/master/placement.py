"""Where one request goes: builds the candidates, lets the policy score them, keeps the reasons.

A rank is ready while its unfinished predicted prefill work is under the lead (the time a grant
takes to become a running prefill, so that nothing idles). Ready ranks whose pool has room for the
request are candidates. A policy that `holds` is offered busy ranks as well, with their waits: where
one of them still scores best, which by the default policy means

    wait_busy + (1 + lam) * prefill_busy < wait_idle + (1 + lam) * prefill_idle

the request is held for it. A head that every rank holds never satisfies it: both prefills are
equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import inf, isfinite, isnan

import msgspec
import numpy as np

from rtp.core.master.matches import Matches
from rtp.core.master.offer import Offer
from rtp.core.master.pairing import Need, Pairs, Partner
from rtp.core.master.predictor import RankPredict
from rtp.core.master.view import View
from rtp.core.master.window import Waiting
from rtp.core.messages import Ask
from rtp.core.policy import Query, Routing
from rtp.core.types import BoolArray, FloatArray, IntArray, RequestId, WorkerId, num_hashes

ROUND_DIGITS = 6
"""Scores are compared in whole microseconds, so that every machine decides alike."""
ROUNDING = 2.0 * 10.0**-ROUND_DIGITS
SMALLEST_PART = 1e-15
"""Scores that differ by more than one of these, the second times their size, never round alike."""
MOST_REASON = 200
"""Characters kept of a failing policy's message."""
TOLD = 4
"""Top candidates whose numbers are kept."""


class Choice(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a look at one request found."""

    row: int
    hold: bool
    """Wait for `row` rather than go to the best idle rank."""
    matched_tokens: int
    new_tokens: int
    prefill_s: float
    wait_s: float
    failure: str
    """What the policy did wrong, if it was not the same as the last time."""
    partner: Partner | None = None
    """Where it goes on after its first tokens, if not here."""


class Reason(msgspec.Struct, frozen=True, gc=False):
    """One of the best candidates, and its numbers."""

    place: tuple[WorkerId, int]
    score: float
    matched_tokens: float
    wait_s: float
    prefill_s: float


class Reasons(msgspec.Struct, frozen=True, gc=False):
    """Why a request went where it did: the best candidates, the chosen one first."""

    number: int
    at: float
    best: tuple[Reason, ...]
    num_candidates: int
    fallback: str
    partner: Partner | None = None
    decode_place: tuple[WorkerId, int] | None = None
    """Where it goes on, if elsewhere, and why there."""


class Placement:
    """look() at one request; reasons() for people, of the last `kept` grants."""

    def __init__(
        self,
        routing: Routing,
        matches: Matches,
        place_of: Callable[[int], tuple[WorkerId, int]],
        kept: int,
    ) -> None:
        self._place_of = place_of
        self._routing = routing
        self._holds = bool(getattr(routing, "holds", False))
        self._by_row = bool(getattr(routing, "by_row", False))
        self._monotone = bool(getattr(routing, "monotone", False))
        self._matches = matches
        self._kept = kept
        self._reasons: OrderedDict[RequestId, Reasons] = OrderedDict()
        self.num_decisions = 0
        self.num_looks = 0
        self.num_fallbacks = 0
        self.last_fallback = ""
        self.num_split = 0
        """Decisions that name a decode rank."""
        self.lacked_headroom = False
        """The last look found no rank on which the request could end."""

    def look(
        self,
        waiting: Waiting,
        view: View,
        block_size: int,
        expected_output: int,
        *,
        allowed: BoolArray,
        affine_row: int,
        now: float,
        pairs: Pairs | None = None,
        partners: BoolArray | None = None,
        affine_decode_row: int = -1,
    ) -> Choice | None:
        """The best rank for one request, or None when no ready rank can take it.

        allowed: [R] of view.rows, those open to this request; view.open if it is all that are.
        expected_output: tokens of one choice. pairs: where ranks prefill for others; partners: [R],
        those that it may go on at. Cost: one prefix match, some 10 array calls and those of the
        policy, whatever R; 50 more with pairs.
        """
        self.num_looks += 1
        ask = waiting.ask
        match = self._matches.of(ask.hashes)
        most = reusable(ask.num_tokens, block_size)
        matched = view.at.of(match.device) * block_size
        if match.best * block_size > most:
            matched = np.minimum(matched, most)
        whole = ask.num_tokens + ask.n * expected_output
        partner, few, mask = None, None, None
        base = view.offered if self._holds else view.ready
        prunes = self._monotone and view.alike and len(view.rows) > TOLD
        if pairs is not None:
            need = Need(ask.num_tokens, ask.n, expected_output, ask.max_tokens <= 1)
            if not need.short:
                able = allowed if partners is None else partners
                partner = pairs.partner(view, need, matched, able, affine_decode_row)
            if prunes:
                few = pairs.contenders(view, base, need, matched, allowed, partner, affine_row)
            self.lacked_headroom = False
            if few is None:
                fits = pairs.fits(view, need, matched, allowed, partner)
                self.lacked_headroom = not np.count_nonzero(fits)
        elif allowed is not view.open or whole > view.least_room:
            fits = allowed & (view.room >= whole - matched)
        else:
            fits = view.open
        if few is None and pairs is None and prunes:
            few = contenders(view, base & fits, matched, affine_row)
        num_candidates = view.num_offered if self._holds else view.num_ready
        if few is None:
            if not np.count_nonzero(view.ready & fits):
                return None
            mask = base & fits
            num_candidates = int(np.count_nonzero(mask))
            if num_candidates == len(mask):
                mask = None
            elif not self._by_row:
                few, mask = mask.nonzero()[0], None
        offer = Offer(
            view,
            few,
            mask,
            matched=matched,
            match=match,
            block_size=block_size,
            most=most,
            affine_row=affine_row,
            num_candidates=num_candidates,
        )
        query = Query(
            num_tokens=ask.num_tokens,
            max_tokens=ask.max_tokens,
            num_blocks=num_hashes(ask.hashes),
            block_size=block_size,
            priority=ask.priority,
            number=self.num_decisions,
            expected_output=expected_output,
        )
        predict = RankPredict(offer.coefficients, len(offer))
        known = self.last_fallback
        scores, fallback = self._score(query, offer, predict)
        if pairs is None:
            best = _best(scores, offer)
        else:
            by_way = _best_of_each(pairs, scores, offer, predict, ask.num_tokens)
            found = pairs.best(view, offer, by_way, need, matched, allowed, partner)
            if found is None:
                return None
            best = found
            if not offer.which(pairs.prefills).item(best):
                partner = None
        hold = not offer.ready(best)
        cached = offer.matched_tokens.item(best)
        choice = Choice(
            row=offer.rank_ids.item(best),
            hold=hold,
            matched_tokens=int(cached),
            new_tokens=ask.num_tokens - int(cached),
            prefill_s=predict.prefill_of(best, ask.num_tokens - cached, cached),
            wait_s=offer.wait_s.item(best),
            failure=fallback if fallback != known else "",
            partner=partner,
        )
        if not hold:
            self._keep(ask, offer, predict, scores, best, fallback, partner, now)
        return choice

    def reasons(self, request_id: RequestId) -> Reasons | None:
        return self._reasons.get(request_id)

    def last(self, count: int) -> list[tuple[RequestId, Reasons]]:
        """Newest first."""
        ids = list(self._reasons)[-count:]
        return [(request_id, self._reasons[request_id]) for request_id in reversed(ids)]

    def _score(self, query: Query, offer: Offer, predict: RankPredict) -> tuple[FloatArray, str]:
        """The policy's scores, ours to change; least predicted wait where it fails."""
        try:
            scores = np.asarray(self._routing.score(query, offer, predict), dtype=np.float64)
        except Exception as error:  # a user's policy may raise anything; serving goes on
            reason = f"raised {type(error).__name__}: {error}"[:MOST_REASON]
        else:
            if scores.shape != (len(offer),):
                reason = f"returned shape {scores.shape}, not {(len(offer),)}"
            else:
                scores = offer.masked(scores)
                if not isnan(scores.item(scores.argmax())):
                    return scores, ""
                reason = "returned NaN"
        self.num_fallbacks += 1
        self.last_fallback = reason
        matched = offer.matched_tokens
        prefill_s = predict.prefill_s(query.num_tokens - matched, matched)
        return offer.masked(-(offer.wait_s + prefill_s)), reason

    def _keep(
        self,
        ask: Ask,
        offer: Offer,
        predict: RankPredict,
        scores: FloatArray,
        best: int,
        fallback: str,
        partner: Partner | None,
        now: float,
    ) -> None:
        """Remembers the numbers of the best. Uses the scores up."""
        top = []
        for at in range(min(TOLD, offer.num_candidates, len(offer))):
            index = int(scores.argmax()) if at else best
            cached = offer.matched_tokens.item(index)
            prefill_s = predict.prefill_of(index, ask.num_tokens - cached, cached)
            place = self._place_of(offer.rank_ids.item(index))
            score = scores.item(index)
            top.append(Reason(place, score, cached, offer.wait_s.item(index), prefill_s))
            scores[index] = -inf
        self._reasons.pop(ask.request_id, None)
        decode_place = None if partner is None else self._place_of(partner.row)
        self._reasons[ask.request_id] = Reasons(
            number=self.num_decisions,
            at=now,
            best=tuple(top),
            num_candidates=offer.num_candidates,
            fallback=fallback,
            partner=partner,
            decode_place=decode_place,
        )
        self.num_decisions += 1
        self.num_split += partner is not None
        if len(self._reasons) > self._kept:
            self._reasons.popitem(last=False)


def _best(scores: FloatArray, offer: Offer) -> int:
    """The highest score; of those that are equal in whole microseconds the least loaded."""
    best = int(scores.argmax())
    top = scores.item(best)
    slack = ROUNDING + SMALLEST_PART * abs(top) if isfinite(top) else 0.0
    near = (scores >= top - slack).nonzero()[0]
    if len(near) == 1:
        return best
    rounded = np.round(scores.take(near), ROUND_DIGITS)
    return offer.least(near[rounded == rounded.max()])


def _best_of_each(
    pairs: Pairs, scores: FloatArray, offer: Offer, predict: RankPredict, num_tokens: int
) -> list[tuple[int, int, float]]:
    """Of each way that has candidates: the way, the best one, its predicted prefill."""
    found = []
    for way, ranks in pairs.by_way:
        among = offer.which(ranks)
        if not np.count_nonzero(among):
            continue
        theirs = np.where(among, scores, -inf)
        top = theirs.item(theirs.argmax())
        index = _best(theirs, offer) if top > -inf else int(among.argmax())
        cached = offer.matched_tokens.item(index)
        found.append((way, index, predict.prefill_of(index, num_tokens - cached, cached)))
    return found


def contenders(
    view: View, offered: BoolArray, matched: FloatArray, affine_row: int
) -> IntArray | None:
    """Where the candidates stand that may win by a monotone policy: an idle one, and those that
    have more of the prompt than it; the chat's own, for ties. None: all, for none is idle.
    offered: [R] candidates, matched: [R] tokens."""
    idlest = view.idlest(matched, offered)
    if idlest < 0:
        return None
    better = offered & (matched > matched.item(idlest))
    better[idlest] = True
    own = view.where(affine_row)
    if own >= 0 and offered.item(own):
        better[own] = True
    return better.nonzero()[0]


def reusable(num_tokens: int, block_size: int) -> int:
    """The last token is always computed: whole blocks among the first num_tokens - 1."""
    return (num_tokens - 1) // block_size * block_size

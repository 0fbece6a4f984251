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

import msgspec
import numpy as np

from rtp.core.master.contenders import ANY, NO_NUMBER, NUM_TOLD, candidates, tell, winner
from rtp.core.master.offer import EVERYBODY, Offer
from rtp.core.master.pairing import Need, Pairs, Partner
from rtp.core.master.partners import PREFILL
from rtp.core.master.predictor import RankPredict
from rtp.core.master.prefix_map import PrefixMap
from rtp.core.master.view import View
from rtp.core.master.window import Waiting
from rtp.core.messages import Ask
from rtp.core.policy import Query, Routing
from rtp.core.types import BoolArray, FloatArray, IntArray, RequestId, WorkerId, num_hashes

SATURATED, RELAXED = 0.97, 0.9
"""Shares of its time. Above the one the Master tells policies of no backlog, below the other it
does again: the more waits, the more are held for busy ranks, and a hold costs a second look."""
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
    places: tuple[tuple[WorkerId, int], ...]
    told: bytes
    """Their rows and numbers, as tell() writes them: made readable when somebody asks."""
    num_candidates: int
    fallback: str
    partner: Partner | None = None
    decode_place: tuple[WorkerId, int] | None = None
    """Where it goes on, if elsewhere, and why there."""

    @property
    def best(self) -> list[Reason]:
        numbers = np.frombuffer(self.told).reshape(-1, NUM_TOLD)[:, 1:].tolist()
        return [Reason(place, *row) for place, row in zip(self.places, numbers, strict=True)]


class Placement:
    """look() at one request; reasons() for people, of the last `kept` grants."""

    def __init__(
        self,
        routing: Routing,
        prefix_map: PrefixMap,
        place_of: Callable[[int], tuple[WorkerId, int]],
        kept: int,
    ) -> None:
        self._place_of = place_of
        self._routing = routing
        self._holds = bool(getattr(routing, "holds", False))
        self.tells_backlog = True
        """The Master has time for the holds that follow."""
        self._by_row = bool(getattr(routing, "by_row", False))
        self._monotone = bool(getattr(routing, "monotone", False))
        self._map = prefix_map
        self._kept = kept
        self._reasons: OrderedDict[RequestId, Reasons] = OrderedDict()
        self._order: IntArray = np.zeros(TOLD, dtype=np.int64)
        self._told: FloatArray = np.zeros((TOLD, NUM_TOLD))
        self.num_decisions = 0
        self.num_looks = 0
        self.num_vain = 0
        """Looks that found no rank."""
        self.num_fallbacks = 0
        self.last_fallback = ""
        self.num_split = 0
        """Decisions that name a decode rank."""
        self.lacked_headroom = False
        """The last look found no rank on which the request could end."""
        self.better_in_line = False
        """The last look found nothing as good as to wait for a busy prefill rank."""

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
        backlog_s: float = 0.0,
    ) -> Choice | None:
        """The best rank for one request, or None when no ready rank can take it.

        allowed: [R] of view.rows, those open to this request; view.open if it is all that are.
        expected_output: tokens of one choice. pairs: where ranks prefill for others; partners: [R],
        those that it may go on at. backlog_s: of Query. Cost: one prefix match, some passes over
        the ranks, 1 us each for a thousand, and what the policy takes.
        """
        self.num_looks += 1
        self.better_in_line = False
        ask = waiting.ask
        match = self._map.match(ask.hashes)
        most = reusable(ask.num_tokens, block_size)
        view.match(match.device, block_size, most)
        need = Need(ask.num_tokens, ask.n, expected_output, ask.max_tokens <= 1)
        own = view.where(affine_row)
        prunes = self._monotone and view.alike and len(view.rows) > TOLD
        partner = None
        if pairs is None:
            num_ready, num_candidates, num_few = candidates(
                view.columns,
                view.flags,
                view.matched_tokens,
                allowed,
                need.whole,
                self._holds,
                prunes,
                own,
                view.mask,
                view.few,
            )
        else:
            if not need.short:
                able = allowed if partners is None else partners
                partner = pairs.partner(view, need, able, affine_decode_row)
            num_fits, num_ready, num_candidates, num_few = pairs.candidates(
                view, need, allowed, partner, self._holds, prunes, own
            )
            self.lacked_headroom = not num_fits
        if not num_ready:
            self.num_vain += 1
            return None
        at = EVERYBODY
        if num_few >= 0:
            at = view.few[:num_few]
        elif num_candidates < len(view.rows) and not self._by_row:
            at = view.mask.nonzero()[0]
        offer = Offer(view, at, match, most=most, affine_row=affine_row)
        query = Query(
            num_tokens=ask.num_tokens,
            max_tokens=ask.max_tokens,
            num_blocks=num_hashes(ask.hashes),
            block_size=block_size,
            priority=ask.priority,
            number=self.num_decisions,
            expected_output=expected_output,
            backlog_s=backlog_s if self.tells_backlog else 0.0,
        )
        predict = RankPredict(offer.coefficients, len(offer))
        known = self.last_fallback
        scores, best, fallback = self._score(query, view, offer, at, predict, own)
        if pairs is not None:
            by_way = []
            for way in pairs.ways:
                index = winner(
                    scores, at, view.mask, pairs.kinds, way, view.columns, view.flags, own
                )
                if index >= 0:
                    cached = offer.matched_tokens.item(index)
                    prefill_s = predict.prefill_of(index, ask.num_tokens - cached, cached)
                    by_way.append((way, index, prefill_s))
            found = pairs.best(view, offer, by_way, need, allowed, partner)
            self.better_in_line = found is None
            if found is None:
                self.num_vain += 1
                return None
            way, best = found
            if way != PREFILL:
                partner = None
        place = offer.place(best)
        count = tell(
            scores,
            at,
            view.mask,
            view.rows,
            view.columns,
            view.matched_tokens,
            view.coefficients,
            ask.num_tokens,
            best,
            self._order,
            self._told,
        )
        row, _, cached, wait_s, prefill_s = self._told[0].tolist()
        choice = Choice(
            row=int(row),
            hold=not view.ready.item(place),
            matched_tokens=int(cached),
            new_tokens=ask.num_tokens - int(cached),
            prefill_s=prefill_s,
            wait_s=wait_s,
            failure=fallback if fallback != known else "",
            partner=partner,
        )
        if not choice.hold:
            self._keep(ask, self._told[:count], num_candidates, fallback, partner, now)
        return choice

    def busy(self, share: float) -> None:
        """How much of a core the Master's loop uses."""
        self.tells_backlog = share <= SATURATED if self.tells_backlog else share < RELAXED

    def reasons(self, request_id: RequestId) -> Reasons | None:
        return self._reasons.get(request_id)

    def last(self, count: int) -> list[tuple[RequestId, Reasons]]:
        """Newest first."""
        ids = list(self._reasons)[-count:]
        return [(request_id, self._reasons[request_id]) for request_id in reversed(ids)]

    def _score(
        self,
        query: Query,
        view: View,
        offer: Offer,
        at: IntArray,
        predict: RankPredict,
        own: int,
    ) -> tuple[FloatArray, int, str]:
        """The policy's scores, the best of them, and what is wrong with them: least predicted wait
        where it fails."""
        facts = at, view.mask, EVERYBODY, ANY, view.columns, view.flags, own
        try:
            given = self._routing.score(query, offer, predict)
            scores = np.ascontiguousarray(given, dtype=np.float64)
        except Exception as error:  # a user's policy may raise anything; serving goes on
            reason = f"raised {type(error).__name__}: {error}"[:MOST_REASON]
        else:
            if scores.shape != (len(offer),):
                reason = f"returned shape {scores.shape}, not {(len(offer),)}"
            else:
                best = winner(scores, *facts)
                if best != NO_NUMBER:
                    return scores, best, ""
                reason = "returned NaN"
        self.num_fallbacks += 1
        self.last_fallback = reason
        matched = offer.matched_tokens
        prefill_s = predict.prefill_s(query.num_tokens - matched, matched)
        scores = -(offer.wait_s + prefill_s)
        return scores, winner(scores, *facts), reason

    def _keep(
        self,
        ask: Ask,
        told: FloatArray,
        num_candidates: int,
        fallback: str,
        partner: Partner | None,
        now: float,
    ) -> None:
        """Remembers the best, and their numbers as tell() writes them."""
        places = [self._place_of(int(row)) for row in told[:, 0].tolist()]
        self._reasons.pop(ask.request_id, None)
        decode_place = None if partner is None else self._place_of(partner.row)
        self._reasons[ask.request_id] = Reasons(
            number=self.num_decisions,
            at=now,
            places=tuple(places),
            told=told.tobytes(),
            num_candidates=num_candidates,
            fallback=fallback,
            partner=partner,
            decode_place=decode_place,
        )
        self.num_decisions += 1
        self.num_split += partner is not None
        if len(self._reasons) > self._kept:
            self._reasons.popitem(last=False)


def reusable(num_tokens: int, block_size: int) -> int:
    """The last token is always computed: whole blocks among the first num_tokens - 1."""
    return (num_tokens - 1) // block_size * block_size

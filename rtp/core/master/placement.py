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
from dataclasses import dataclass

import numpy as np

from rtp.core.hashing import low64
from rtp.core.master.predictor import RankPredict
from rtp.core.master.prefix_map import PrefixMap
from rtp.core.master.ranks import MOST_HELD, View
from rtp.core.master.window import Waiting
from rtp.core.policy import Candidates, Query, Routing
from rtp.core.types import BoolArray, FloatArray, RequestId, WorkerId, num_hashes

ROUND_DIGITS = 6
"""Scores are compared in whole microseconds, so that every machine decides alike."""
MOST_REASON = 200
"""Characters kept of a failing policy's message."""
TOLD = 4
"""Top candidates whose numbers are kept."""


@dataclass(frozen=True, slots=True)
class Choice:
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


@dataclass(frozen=True, slots=True)
class Reasons:
    """Why a request went where it did: the best candidates, the chosen one first."""

    number: int
    at: float
    places: list[tuple[WorkerId, int]]
    scores: FloatArray
    matched_tokens: FloatArray
    wait_s: FloatArray
    prefill_s: FloatArray
    num_candidates: int
    fallback: str


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
        self._map = prefix_map
        self._kept = kept
        self._reasons: OrderedDict[RequestId, Reasons] = OrderedDict()
        self.num_decisions = 0
        self.num_looks = 0
        self.num_fallbacks = 0
        self.last_fallback = ""

    def look(
        self,
        waiting: Waiting,
        view: View,
        block_size: int,
        expected_output: int,
        *,
        ready: BoolArray,
        allowed: BoolArray,
        affine_row: int,
        now: float,
    ) -> Choice | None:
        """The best rank for one request, or None when no ready rank can take it.

        ready, allowed: [R] of view.rows: under the lead; open to this request. expected_output:
        tokens of one choice. Cost: one prefix match and about 40 array calls, whatever R.
        """
        self.num_looks += 1
        ask = waiting.ask
        match = self._map.match(low64(ask.hashes))
        most = reusable(ask.num_tokens, block_size)
        matched = np.minimum(match.device.take(view.rows) * block_size, most)
        new = ask.num_tokens - matched
        fits = allowed & (view.room >= new + ask.n * expected_output)
        if not (fits & ready).any():
            return None
        worth_a_wait = view.held < MOST_HELD if self._holds else False
        at = (fits & (ready | worth_a_wait)).nonzero()[0]
        rows = view.rows.take(at)
        offered = Candidates(
            rank_ids=rows,
            matched_tokens=matched.take(at),
            host_tokens=np.minimum(match.host.take(rows) * block_size, most),
            best_tokens=float(min(match.best * block_size, most)),
            wait_s=view.wait_s.take(at),
            prefill_tokens=view.prefill_tokens.take(at),
            num_requests=view.num_requests.take(at),
            decode_rows=view.decode_rows.take(at),
            context_tokens=view.context_tokens.take(at),
            kv_free=view.kv_free.take(at),
            kv_total=view.kv_total.take(at),
            affine=rows == affine_row,
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
        predict = RankPredict(view.coefficients.take(at, axis=1))
        prefill_s = predict.prefill_s(new.take(at), offered.matched_tokens)
        known = self.last_fallback
        scores, fallback = self._score(query, offered, predict, prefill_s)
        ties = (scores == scores.max()).nonzero()[0]
        keys = (rows, view.load.take(at), ~offered.affine, ~ready.take(at))
        best = int(ties[np.lexsort([key.take(ties) for key in keys])[0]])
        hold = not ready[at[best]]
        if not hold:
            self._keep(ask.request_id, offered, scores, prefill_s, best, fallback, now)
        return Choice(
            row=int(offered.rank_ids[best]),
            hold=hold,
            matched_tokens=int(offered.matched_tokens[best]),
            new_tokens=int(new[at[best]]),
            prefill_s=float(prefill_s[best]),
            wait_s=float(offered.wait_s[best]),
            failure=fallback if fallback != known else "",
        )

    def reasons(self, request_id: RequestId) -> Reasons | None:
        return self._reasons.get(request_id)

    def last(self, count: int) -> list[tuple[RequestId, Reasons]]:
        """Newest first."""
        ids = list(self._reasons)[-count:]
        return [(request_id, self._reasons[request_id]) for request_id in reversed(ids)]

    def _score(
        self, query: Query, offered: Candidates, predict: RankPredict, prefill_s: FloatArray
    ) -> tuple[FloatArray, str]:
        """The policy's scores in whole microseconds; least predicted wait where it fails."""
        try:
            scores = np.asarray(self._routing.score(query, offered, predict), dtype=np.float64)
        except Exception as error:  # a user's policy may raise anything; serving goes on
            reason = f"raised {type(error).__name__}: {error}"[:MOST_REASON]
        else:
            if scores.shape != offered.rank_ids.shape:
                reason = f"returned shape {scores.shape}, not {offered.rank_ids.shape}"
            elif np.isnan(scores).any():
                reason = "returned NaN"
            else:
                return np.round(scores, ROUND_DIGITS), ""
        self.num_fallbacks += 1
        self.last_fallback = reason
        return np.round(-(offered.wait_s + prefill_s), ROUND_DIGITS), reason

    def _keep(
        self,
        request_id: RequestId,
        offered: Candidates,
        scores: FloatArray,
        prefill_s: FloatArray,
        best: int,
        fallback: str,
        now: float,
    ) -> None:
        top = np.argpartition(-scores, min(TOLD, len(scores) - 1))[:TOLD]
        top = top[np.lexsort((offered.rank_ids[top], -scores[top], top != best))]
        self._reasons.pop(request_id, None)
        self._reasons[request_id] = Reasons(
            number=self.num_decisions,
            at=now,
            places=[self._place_of(row) for row in offered.rank_ids[top].tolist()],
            scores=scores[top],
            matched_tokens=offered.matched_tokens[top],
            wait_s=offered.wait_s[top],
            prefill_s=prefill_s[top],
            num_candidates=len(scores),
            fallback=fallback,
        )
        self.num_decisions += 1
        if len(self._reasons) > self._kept:
            self._reasons.popitem(last=False)


def reusable(num_tokens: int, block_size: int) -> int:
    """The last token is always computed: whole blocks among the first num_tokens - 1."""
    return (num_tokens - 1) // block_size * block_size

"""Where one request goes: builds the candidates, lets the policy score them, keeps the reasons.

A rank is a candidate while its unfinished predicted prefill work is under the lead (the time a
grant takes to become a running prefill, so that nothing idles) and its pool has room for the
request. A busy rank that holds the prompt's prefix is worth waiting for when

    wait_busy + (1 + LAM) * prefill_busy < wait_idle + (1 + LAM) * prefill_idle

in predicted seconds. LAM weighs the rank's time that a needless prefill takes from others. A head
that every rank holds never satisfies it: both prefills are equal then.
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
from rtp.core.messages import Ask
from rtp.core.policy import Candidates, Query, Routing
from rtp.core.types import BoolArray, FloatArray, IntArray, RequestId, WorkerId

LAM = 1.0
ROUND_DIGITS = 6
"""Scores are compared in whole microseconds, so that every machine decides alike."""
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
    """Why a request went where it did: the best candidates, best first."""

    number: int
    at: float
    chosen: int
    rows: IntArray
    places: list[tuple[WorkerId, int]]
    """Worker and rank of each row then; rows are reused."""
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
        need_output: int,
        *,
        ready: BoolArray,
        allowed: BoolArray,
        affine_row: int,
        now: float,
    ) -> Choice | None:
        """The best rank for one request, or None when no candidate can take it now.

        ready, allowed: [R] of view.rows: under the lead; open to this request. need_output: tokens
        it is expected to produce. Cost: one prefix match and about 30 array calls, whatever R.
        """
        self.num_looks += 1
        ask = waiting.ask
        match = self._map.match(low64(ask.hashes))
        most = reusable(ask.num_tokens, block_size)
        matched = np.minimum(match.device[view.rows] * block_size, most)
        fits = allowed & (view.room >= ask.num_tokens - matched + need_output)
        candidates = (fits & ready).nonzero()[0]
        if not len(candidates):
            return None
        new = ask.num_tokens - matched
        prefill_s = RankPredict(view.coefficients).prefill_s(new, matched)
        host = np.minimum(match.host[view.rows] * block_size, most)
        best_tokens = float(min(match.best * block_size, most))
        offered = _candidates(view, candidates, matched, host, best_tokens, affine_row)
        known = self.last_fallback
        scores, fallback = self._score(ask, offered, block_size, view, candidates, prefill_s)
        order = np.lexsort((offered.rank_ids, view.load[candidates], ~offered.affine, -scores))
        chosen = int(candidates[order[0]])
        busy = self._worth_waiting_for(chosen, view, fits & ~ready, prefill_s)
        if busy is None:
            top = order[:TOLD]
            told = candidates[top]
            self._keep(
                ask.request_id,
                Reasons(
                    number=self.num_decisions,
                    at=now,
                    chosen=int(view.rows[chosen]),
                    rows=view.rows[told],
                    places=[self._place_of(row) for row in view.rows[told].tolist()],
                    scores=scores[top],
                    matched_tokens=matched[told],
                    wait_s=view.wait_s[told],
                    prefill_s=prefill_s[told],
                    num_candidates=len(candidates),
                    fallback=fallback,
                ),
            )
            self.num_decisions += 1
        at = chosen if busy is None else busy
        return Choice(
            row=int(view.rows[at]),
            hold=busy is not None,
            matched_tokens=int(matched[at]),
            new_tokens=int(new[at]),
            prefill_s=float(prefill_s[at]),
            wait_s=float(view.wait_s[at]),
            failure=fallback if fallback != known else "",
        )

    def reasons(self, request_id: RequestId) -> Reasons | None:
        return self._reasons.get(request_id)

    def last(self, count: int) -> list[tuple[RequestId, Reasons]]:
        """Newest first."""
        ids = list(self._reasons)[-count:]
        return [(request_id, self._reasons[request_id]) for request_id in reversed(ids)]

    def _score(
        self,
        ask: Ask,
        offered: Candidates,
        block_size: int,
        view: View,
        candidates: IntArray,
        prefill_s: FloatArray,
    ) -> tuple[FloatArray, str]:
        """The policy's scores in whole microseconds; least predicted wait where it fails."""
        query = Query(
            num_tokens=ask.num_tokens,
            max_tokens=ask.max_tokens,
            num_blocks=len(ask.hashes) // 16,
            block_size=block_size,
            priority=ask.priority,
            number=self.num_decisions,
        )
        predict = RankPredict(view.coefficients[:, candidates])
        try:
            scores = np.asarray(self._routing.score(query, offered, predict), dtype=np.float64)
        except Exception as error:  # a user's policy may raise anything; serving goes on
            reason = f"raised {type(error).__name__}: {error}"
        else:
            if scores.shape != offered.rank_ids.shape:
                reason = f"returned shape {scores.shape}, not {offered.rank_ids.shape}"
            elif np.isnan(scores).any():
                reason = "returned NaN"
            else:
                return np.round(scores, ROUND_DIGITS), ""
        self.num_fallbacks += 1
        self.last_fallback = reason
        return np.round(-(offered.wait_s + prefill_s[candidates]), ROUND_DIGITS), reason

    def _worth_waiting_for(
        self, chosen: int, view: View, busy: BoolArray, prefill_s: FloatArray
    ) -> int | None:
        """Index of the busy rank that beats the chosen one even after its wait, if any."""
        if not self._holds:
            return None
        cost = np.round(view.wait_s + (1 + LAM) * prefill_s, ROUND_DIGITS)
        at = (busy & (view.held < MOST_HELD) & (cost < cost[chosen])).nonzero()[0]
        return int(at[cost[at].argmin()]) if len(at) else None

    def _keep(self, request_id: RequestId, reasons: Reasons) -> None:
        self._reasons.pop(request_id, None)
        self._reasons[request_id] = reasons
        if len(self._reasons) > self._kept:
            self._reasons.popitem(last=False)


def reusable(num_tokens: int, block_size: int) -> int:
    """The last token is always computed: whole blocks among the first num_tokens - 1."""
    return (num_tokens - 1) // block_size * block_size


def _candidates(
    view: View,
    at: IntArray,
    matched: FloatArray,
    host: FloatArray,
    best_tokens: float,
    affine_row: int,
) -> Candidates:
    rows = view.rows[at]
    return Candidates(
        rank_ids=rows,
        matched_tokens=matched[at],
        host_tokens=host[at],
        best_tokens=best_tokens,
        wait_s=view.wait_s[at],
        prefill_tokens=view.prefill_tokens[at],
        num_requests=view.num_requests[at],
        decode_rows=view.decode_rows[at],
        context_tokens=view.context_tokens[at],
        kv_free=view.kv_free[at],
        kv_total=view.kv_total[at],
        affine=rows == affine_row,
    )

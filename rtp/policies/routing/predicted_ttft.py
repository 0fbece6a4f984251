"""Least predicted time to first token, with what the choice costs others weighed in: the default.

A prefill costs its request once and everybody behind it once more, so its seconds count (1 + lam)
times, the wait before it once. The more waits, the more are behind it: lam grows by `crowd` with
each second of prefill that waits for a rank, up to five. On the Mooncake conversation trace at 1.75
times its rate that takes P95 TTFT from 8.7 to 8.2 s and the longest from 87 to 75 s, for hits are
worth most where work piles up; at the trace's own rate little waits and nothing changes.

Beside other requests each output token takes longer than it would alone; that excess over the
expected output is added in seconds. Without it a quiet fleet would decode everything on the one
rank that happened to see a shared head first. Where others decode, the step with the prompt decodes
for them, too, and they wait for the prompt. That delay weighs little, for it may not be avoided by
holding a long prompt: when the rank that it waits for is free, others decode there. On eight ranks
that prefill and decode, the first 4,000 rows of the same trace have a P95 TTFT of 6.9 s, and 9.3 s
at a weight of 0.25; their later tokens take 39 ms and 36 ms, without any such weight 44 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from rtp.core.errors import ConfigError
from rtp.core.kernels import kernel
from rtp.core.policy import TABLE, Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray

LAM = 1.0
CROWD = 0.7
"""From 0.4 to 0.8 all do alike in replays of that trace (bench/policies.py)."""
MOST_BACKLOG_S = 5.0
"""A deeper queue says no more: ten seconds gain nothing over five, and each request that is held
costs the Master a second look."""
EXCESS = 0.25
"""A later token that comes late hurts less than a late first one. At a quarter, generated chats
spread over their ranks (tests/core/master/test_traps.py) and lose little of their cache hits."""
DELAY = 0.02
MATCHED, WAIT, PREFILL, REQUESTS, ROWS, CONTEXT = range(6)
assert TABLE[:6] == (
    *("matched_tokens", "wait_s", "prefill_tokens", "num_requests", "decode_rows"),
    "context_tokens",
)


@dataclass(frozen=True, slots=True)
class PredictedTtft:
    lam: float = LAM
    crowd: float = CROWD
    """What lam grows by for each second of backlog; 0 leaves it as it is."""
    excess: float = EXCESS
    """Weight of the excess decode time of the request."""
    delay: float = DELAY
    """Weight of the seconds that its prompt keeps each of the others from decoding."""
    holds: bool = True
    """A busy rank may be worth waiting for."""
    by_row: bool = True
    """A rank's score depends on its own row only."""
    monotone: bool = True
    """More work there, or less of the prompt, never makes a rank's score higher."""

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        """Minus (wait + step beside others + (1 + lam) * prefill + excess of its decode + delay of
        the others'), in seconds."""
        return minus_cost_s(
            candidates.table,
            predict.coefficients,
            query.num_tokens,
            self.lam + self.crowd * min(query.backlog_s, MOST_BACKLOG_S),
            self.excess * query.expected_output,
            self.delay,
        )


@kernel(
    "f8[::1](Array(f8, 2, 'C', readonly=True), Array(f8, 2, 'C', readonly=True), f8, f8, f8, f8)",
    makes_arrays=True,
)
def minus_cost_s(
    table: FloatArray,
    coefficients: FloatArray,
    num_tokens: float,
    lam: float,
    excess_output: float,
    delay: float,
) -> FloatArray:
    """[R], what score() says, of the columns of Candidates.table. A loop, for it runs with every
    decision."""
    scores = np.empty(table.shape[1])
    for i in range(table.shape[1]):
        k = i if coefficients.shape[1] > 1 else 0
        a, b, c = coefficients[0, k], coefficients[1, k], coefficients[2, k]
        d, e, f = coefficients[3, k], coefficients[4, k], coefficients[5, k]
        cached = table[MATCHED, i]
        new = num_tokens - cached
        prefill_s = a + new * (b + c * (cached + 0.5 * new))
        # Whatever waits there to prefill will decode beside this request, too.
        context = table[CONTEXT, i] + table[PREFILL, i] + num_tokens
        beside_s = d + e * (table[REQUESTS, i] + 1.0) + f * context
        alone_s = d + e + f * num_tokens
        cost_s = table[WAIT, i] + (1.0 + lam) * prefill_s + excess_output * (beside_s - alone_s)
        rows = table[ROWS, i]
        if rows > 0.0:
            cost_s += d + e * rows + f * table[CONTEXT, i] + delay * rows * prefill_s
        scores[i] = -cost_s
    return scores


def build(
    lam: float = LAM,
    crowd: float = CROWD,
    excess: float = EXCESS,
    delay: float = DELAY,
    holds: bool = True,
) -> Routing:
    """holds: whether a busy rank may be worth waiting for."""
    if not all(0 <= value < inf for value in (lam, crowd, excess, delay)):
        raise ConfigError(
            "predicted_ttft takes finite lam, crowd, excess and delay from 0 up,"
            f" not {lam}, {crowd}, {excess}, {delay}"
        )
    return PredictedTtft(lam, crowd, excess, delay, holds)

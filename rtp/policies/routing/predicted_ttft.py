"""Least predicted time to first token, with what the choice costs others weighed in: the default.

A prefill costs its request once and everybody behind it on that rank once more, so its seconds
count (1 + lam) times, the wait before it once. Beside other requests each output token takes longer
than it would alone; that excess over the expected output is added in seconds. Where others decode,
the step with the prompt decodes for them, too, and they wait for the prompt. Without all this a
quiet fleet would decode everything on the one rank that happened to see a shared head first.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from rtp.core.errors import ConfigError
from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray

LAM = 1.0
EXCESS = 0.25
"""A later token that comes late hurts less than a late first one. At a quarter, generated chats
spread over their ranks (tests/core/master/test_traps.py) and lose little of their cache hits."""
ALONE = np.ones(1)


@dataclass(frozen=True, slots=True)
class PredictedTtft:
    lam: float = LAM
    excess: float = EXCESS
    """Weight of the excess decode time; 0 leaves predicted TTFT alone."""
    holds: bool = True
    """A busy rank may be worth waiting for."""
    by_row: bool = True
    """A rank's score depends on its own row only."""
    monotone: bool = True
    """More work there, or less of the prompt, never makes a rank's score higher."""

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        """Minus (wait + step beside others + (1 + lam) * prefill + excess of all decodes), in
        seconds."""
        c, cached = candidates, candidates.matched_tokens
        prefill_s = predict.prefill_s(query.num_tokens - cached, cached)
        tokens = np.asarray(float(query.num_tokens))
        # Whatever waits there to prefill will decode beside this request, too.
        beside_s = predict.decode_s(
            c.num_requests + 1.0, c.context_tokens + c.prefill_tokens + tokens
        )
        excess_s = beside_s - predict.decode_s(ALONE, tokens)
        excess_s *= self.excess * query.expected_output
        cost_s = c.wait_s + (1 + self.lam) * prefill_s + excess_s
        if np.count_nonzero(c.decode_rows):
            step_s = predict.decode_s(c.decode_rows, c.context_tokens)
            cost_s += np.where(c.decode_rows > 0, step_s, 0.0)
            cost_s += self.excess * c.decode_rows * prefill_s
        return np.negative(cost_s)


def build(lam: float = LAM, excess: float = EXCESS) -> Routing:
    if not (0 <= lam < inf and 0 <= excess < inf):
        raise ConfigError(
            f"predicted_ttft takes finite lam and excess from 0 up, not {lam}, {excess}"
        )
    return PredictedTtft(lam, excess)

"""Least predicted time to first token, with the rank's own time weighed in: the default.

A prefill costs its request once and everybody behind it on that rank once more; so its seconds
count (1 + lam) times, the wait before it once.
"""

from __future__ import annotations

from dataclasses import dataclass

from rtp.core.master.placement import LAM
from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray


@dataclass(frozen=True, slots=True)
class PredictedTtft:
    lam: float = LAM
    holds: bool = True
    """A busy rank may be worth waiting for."""

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        """Minus (wait + (1 + lam) * prefill), in seconds."""
        cached = candidates.matched_tokens
        prefill_s = predict.prefill_s(query.num_tokens - cached, cached)
        return -(candidates.wait_s + (1 + self.lam) * prefill_s)


def build(lam: float = LAM) -> Routing:
    return PredictedTtft(lam)

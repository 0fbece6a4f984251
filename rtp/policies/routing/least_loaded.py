"""The rank with the fewest tokens in play: prompt left to compute, and pages of what it decodes."""

from __future__ import annotations

from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray


class LeastLoaded:
    """Tokens, not requests: one long prompt weighs more than ten short ones."""

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        return -(candidates.prefill_tokens + candidates.context_tokens)


def build() -> Routing:
    return LeastLoaded()

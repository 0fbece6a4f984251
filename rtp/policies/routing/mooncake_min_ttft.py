"""Least estimated time to first token, as Mooncake's scheduler is documented (repo 3b5a594).

Wait, then the prefill of what the rank lacks; or, where that is sooner, the pull of the part that
another rank holds and the prefill of the rest. Its Conductor itself chooses nothing: it reports
matches, and this estimate is what they are for.

Left out: refusal over the SLO (admission's gate), replication of hot blocks, pull time by measured
link and congestion. A pull here takes its tokens over a given rate. The default, 0, is no pull,
since a rate that the transport does not reach sends requests where they are slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from rtp.core.errors import ConfigError
from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray


@dataclass(frozen=True, slots=True)
class MooncakeMinTtft:
    pull_tokens_per_s: float

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        """Minus the estimate, in seconds."""
        own = candidates.matched_tokens
        prefill_s = predict.prefill_s(query.num_tokens - own, own)
        if self.pull_tokens_per_s:
            most = np.maximum(own, candidates.best_tokens)
            rest_s = predict.prefill_s(query.num_tokens - most, most)
            prefill_s = np.minimum(prefill_s, (most - own) / self.pull_tokens_per_s + rest_s)
        return -(candidates.wait_s + prefill_s)


def build(pull_tokens_per_s: float = 0.0) -> Routing:
    if not 0 <= pull_tokens_per_s < inf:
        raise ConfigError(
            "mooncake_min_ttft takes finite pull_tokens_per_s from 0 (never pull) up,"
            f" not {pull_tokens_per_s}"
        )
    return MooncakeMinTtft(pull_tokens_per_s)

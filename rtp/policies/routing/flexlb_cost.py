"""What FlexLB computes to choose a prefill worker (alibaba/rtp-llm 4b8d39cd), with its defaults.

Cost is predicted wait and prefill, in seconds. Ranks with 64 requests or more, with over three
times the mean of requests, or of waits, are dropped; if that leaves none, the shortest wait is
kept. Among costs up to the least plus 10 % of it, or 20 ms if that is more, one is drawn evenly: by
seed and decision number. When queues are long that band gives hits away; 0 to 1 % did better on a
public conversation trace.

Left out: hysteresis of the request limit, its formula predictor (ours is measured), the batcher's
own delay (nothing waits for a batch here), its SLO filter (off by default), retry targets, and its
choice of decode workers. Means are over all candidates, not over those a filter before left.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import inf

import numpy as np

from rtp.core.errors import ConfigError
from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray

TOO_MANY = 3.0


@dataclass(frozen=True, slots=True)
class FlexlbCost:
    band: float
    """Of the least cost."""
    band_s: float
    most_requests: float
    seed: int

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        """Minus seconds; those in the band start at its best, those dropped below all others."""
        wait_s, own, num = candidates.wait_s, candidates.matched_tokens, candidates.num_requests
        cost_s = wait_s + predict.prefill_s(query.num_tokens - own, own)
        kept = (num < self.most_requests) & (num <= TOO_MANY * num.mean())
        kept &= wait_s <= TOO_MANY * wait_s.mean()
        if not kept.any():
            kept = np.arange(len(num)) == wait_s.argmin()
        least = float(cost_s[kept].min())
        close = kept & (cost_s <= least + max(self.band * least, self.band_s))
        draw = np.random.default_rng((self.seed, query.number)).random(len(num))
        scores = np.where(close, draw - least, -cost_s)
        return scores - np.where(kept, 0.0, 1.0 + cost_s.max())


def build(
    band: float = 0.1, band_s: float = 0.02, most_requests: float = 64.0, seed: int = 0
) -> Routing:
    policy = FlexlbCost(band, band_s, most_requests, seed)
    if not (isinstance(seed, int) and all(0 <= value < inf for value in astuple(policy))):
        raise ConfigError(
            f"flexlb_cost takes finite numbers from 0 up and a whole seed, not {policy}"
        )
    return policy

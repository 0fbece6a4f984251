"""Any rank, evenly: the floor that other policies are measured against."""

from __future__ import annotations

import numpy as np

from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray


class Random:
    """Drawn from (seed, decision number), so that a replay draws the same."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        draw = np.random.default_rng((self._seed, query.number))
        return draw.random(len(candidates.rank_ids))


def build(seed: int = 0) -> Routing:
    return Random(seed)

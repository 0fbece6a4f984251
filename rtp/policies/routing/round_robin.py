"""Each rank in turn, whatever it holds or carries."""

from __future__ import annotations

import numpy as np

from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray


class RoundRobin:
    """The next rank after the last one chosen, in rank order, of those that have room."""

    def __init__(self) -> None:
        self._last = -1

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        ids = candidates.rank_ids
        turn = np.where(ids > self._last, 0, 1)
        order = np.lexsort((ids, turn))
        self._last = int(ids[order[0]])
        scores = np.empty(len(ids))
        scores[order] = -np.arange(len(ids), dtype=np.float64)
        return scores


def build() -> Routing:
    return RoundRobin()

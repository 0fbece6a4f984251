"""A routing policy with a common mistake: it sorts a column in place."""

from __future__ import annotations

from rtp.core.policy import Candidates, Predict, Query
from rtp.core.types import FloatArray


class Impolite:
    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        candidates.wait_s.sort()
        return -candidates.wait_s


def build() -> Impolite:
    return Impolite()

"""A user's routing policy that does everything wrong that a policy can do."""

from __future__ import annotations

import numpy as np

from rtp.core.policy import Candidates, Predict, Query
from rtp.core.types import FloatArray


class Misbehaving:
    """By the number of the decision: a right answer, NaN, infinities, a wrong shape, an answer of
    another kind, an exception."""

    holds = True

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        scores = np.zeros(len(candidates.rank_ids))
        match query.number % 6:
            case 1:
                scores[-1] = np.nan
            case 2:
                scores[:] = -np.inf
            case 3:
                return np.zeros(len(scores) + 1)
            case 4:
                return None  # type: ignore[return-value]  # what a user may forget
            case 5:
                raise KeyError("no such rank")
        return scores

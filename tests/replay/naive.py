"""Routing as it is often written first; each policy here falls into one of the traps of
test_traps.py."""

from __future__ import annotations

import numpy as np

from rtp.core.policy import Candidates, Predict, Query
from rtp.core.types import FloatArray

LAM = 1.0


class LongestPrefix:
    """Where most of the prompt is held, whatever else is to be done there."""

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        return candidates.matched_tokens


class RandomBand:
    """At random among the ranks that cost at most (1 + width) times what the best one does."""

    def __init__(self, width: float) -> None:
        self._width = width

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        costs = candidates.wait_s + (1 + LAM) * _prefill_s(query, candidates, predict)
        draws = np.random.default_rng(query.number).random(len(costs))
        return np.where(costs <= (1 + self._width) * costs.min(), draws, -costs)


class FewestRequests:
    """Where the fewest requests are, however long they are."""

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        return -candidates.num_requests


class WaitForTheHolder:
    """Waits for the rank that holds most of the prompt while that is cheaper than to compute all of
    it: as if no other rank held anything."""

    holds = True

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        prefill_s = _prefill_s(query, candidates, predict)
        scores = -(candidates.wait_s + prefill_s)
        holder = int(candidates.matched_tokens.argmax())
        cold = np.full(len(scores), float(query.num_tokens))
        saved_s = predict.prefill_s(cold, np.zeros(len(scores))) - prefill_s
        if candidates.wait_s[holder] < (1 + LAM) * saved_s[holder]:
            scores[holder] = 1.0
        return scores


def _prefill_s(query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
    cached = candidates.matched_tokens
    return predict.prefill_s(query.num_tokens - cached, cached)

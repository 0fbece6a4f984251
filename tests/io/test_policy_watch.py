"""A slow policy is left out for a while; a fast one, or one slow moment, is not."""

from __future__ import annotations

import numpy as np
import pytest

from rtp.core.policy import Candidates, Predict, Query
from rtp.core.types import FloatArray
from rtp.io.policy_watch import LIMIT_S, REST_S, STRIKES, PolicyTooSlow, Watched
from rtp.policies.check import a_predictor, a_query, some_candidates
from tests.support.fleet import Fleet


class Clocked:
    """Takes as long as it is told, by a clock of its own."""

    holds = by_row = monotone = True

    def __init__(self) -> None:
        self.now, self.takes_s, self.num_calls = 100.0, 0.0, 0

    def clock(self) -> float:
        return self.now

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        self.now += self.takes_s
        self.num_calls += 1
        return -candidates.wait_s


def score(watched: Watched) -> FloatArray:
    return watched.score(a_query(), some_candidates(3), a_predictor(3))


def test_a_policy_that_is_slow_time_and_again_is_left_out_and_comes_back():
    policy = Clocked()
    watched = Watched(policy, policy.clock)
    assert watched.holds
    assert watched.by_row
    assert watched.monotone
    policy.takes_s = 2 * LIMIT_S
    for _ in range(STRIKES):
        assert score(watched).shape == (3,), "what it found is used"
    with pytest.raises(PolicyTooSlow, match="5 ms"):
        score(watched)
    assert policy.num_calls == STRIKES, "it is not even asked"
    policy.now += REST_S
    policy.takes_s = 0.0
    assert np.isfinite(score(watched)).all()


def test_single_slow_moments_are_forgiven():
    policy = Clocked()
    watched = Watched(policy, policy.clock)
    for number in range(20):
        policy.takes_s = 0.0 if number % STRIKES == 0 else 2 * LIMIT_S
        score(watched)
    assert policy.num_calls == 20


def test_the_master_places_by_least_wait_meanwhile_and_says_why():
    policy = Clocked()
    fleet = Fleet(Watched(policy, policy.clock))
    fleet.add()
    policy.takes_s = 1.0
    for _ in range(STRIKES + 2):
        fleet.finish(fleet.grant(fleet.ask()))
    shown = fleet.master.overview(fleet.now)["policy"]
    assert shown["fallbacks"] == 2
    assert "left out for 10 s" in shown["last_fallback"]
    assert len(fleet.notes("policy.failed")) == 1

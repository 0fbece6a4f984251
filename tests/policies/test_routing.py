"""Each routing policy does what its name says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.policy import Candidates
from rtp.policies.check import PROFILE, a_query
from rtp.policies.check import a_predictor as predict
from rtp.policies.check import some_candidates as candidates


def equal(num: int, **columns: object) -> Candidates:
    """Ranks that differ in nothing but what is given."""
    zeros = np.zeros(num)
    fields = dict.fromkeys(Candidates.__dataclass_fields__, zeros) | {
        "rank_ids": np.arange(num),
        "best_tokens": 0.0,
        "affine": np.zeros(num, dtype=bool),
    }
    return Candidates(**(fields | columns))


def winner(name: str, offered: Candidates, number: int = 0, **params: object) -> int:
    policy = plugins.build("routing", name, **params)
    num = len(offered.rank_ids)
    return int(policy.score(a_query(number), offered, predict(num)).argmax())


@pytest.mark.parametrize(("excess", "delay"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.1)])
def test_predicted_ttft_is_minus_wait_twice_the_prefill_and_what_others_cost(
    excess: float, delay: float
):
    offered = candidates(50)
    policy = plugins.build("routing", "predicted_ttft", excess=excess, delay=delay)
    a, b, c, d, e, f = PROFILE
    for i, score in enumerate(policy.score(a_query(), offered, predict(50))):
        cached = offered.matched_tokens[i]
        new = 1000 - cached
        prefill_s = a + b * new + c * new * (cached + new / 2)
        tokens = offered.context_tokens[i] + offered.prefill_tokens[i]
        slower_s = 50 * (e * offered.num_requests[i] + f * tokens)
        delayed_s = offered.decode_rows[i] * prefill_s
        step_s = 0.0
        if offered.decode_rows[i]:
            step_s = d + e * offered.decode_rows[i] + f * offered.context_tokens[i]
        ttft_s = offered.wait_s[i] + step_s + 2 * prefill_s
        assert score == pytest.approx(-(ttft_s + excess * slower_s + delay * delayed_s))


def test_predicted_ttft_weighs_a_hit_against_a_wait():
    hit = np.array([0.0, 960.0])  # saves 9.6 ms and more, twice
    assert winner("predicted_ttft", equal(2, matched_tokens=hit)) == 1
    waits = np.array([0.0, 0.015])
    assert winner("predicted_ttft", equal(2, matched_tokens=hit, wait_s=waits)) == 1
    waits = np.array([0.0, 0.025])
    assert winner("predicted_ttft", equal(2, matched_tokens=hit, wait_s=waits)) == 0
    assert winner("predicted_ttft", equal(2, matched_tokens=hit, wait_s=waits), lam=2.0) == 1


def test_least_loaded_counts_tokens_not_requests():
    offered = equal(
        3,
        prefill_tokens=np.array([9000.0, 100.0, 0.0]),
        context_tokens=np.array([0.0, 200.0, 500.0]),
        num_requests=np.array([1.0, 10.0, 1.0]),
    )
    assert winner("least_loaded", offered) == 1


def test_round_robin_takes_each_in_turn_also_when_ranks_come_and_go():
    policy = plugins.build("routing", "round_robin")

    def turn(offered: Candidates) -> int:
        scores = policy.score(a_query(), offered, predict(len(offered.rank_ids)))
        return int(offered.rank_ids[scores.argmax()])

    assert [turn(equal(4)) for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    fewer = replace(equal(2), rank_ids=np.array([1, 3]))
    assert [turn(fewer) for _ in range(3)] == [3, 1, 3]
    assert turn(equal(4)) == 0


def test_random_is_even_and_follows_its_seed():
    def draws(seed: int) -> list[int]:
        policy = plugins.build("routing", "random", seed=seed)
        return [int(policy.score(a_query(i), equal(4), predict(4)).argmax()) for i in range(800)]

    assert all(150 < count < 250 for count in Counter(draws(0)).values())
    assert draws(0) == draws(0)
    assert draws(0) != draws(1)

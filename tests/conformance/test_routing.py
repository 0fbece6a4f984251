"""What every routing policy promises, run over all that are found."""

from __future__ import annotations

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.master.predictor import RankPredict
from rtp.core.policy import Candidates, Query, Routing

PROFILE = np.array([1e-3, 1e-5, 1e-10, 1e-3, 1e-4, 1e-8])
NAMES = plugins.names("routing")


def candidates(num: int, seed: int = 0) -> Candidates:
    rng = np.random.default_rng(seed)

    def tokens(most: int) -> np.ndarray:
        return rng.integers(0, most, num).astype(np.float64)

    matched = tokens(60) * 16
    columns = {
        "rank_ids": np.sort(rng.choice(5000, num, replace=False)),
        "matched_tokens": matched,
        "host_tokens": matched + 16,
        "best_tokens": float(matched.max() + 16),
        "wait_s": rng.random(num) * 0.03,
        "prefill_tokens": tokens(3000),
        "num_requests": tokens(50),
        "decode_rows": tokens(40),
        "context_tokens": tokens(40_000),
        "kv_free": tokens(90_000),
        "kv_total": np.full(num, 100_000.0),
        "affine": rng.random(num) < 0.1,
    }
    for column in columns.values():
        if isinstance(column, np.ndarray):
            column.flags.writeable = False
    return Candidates(**columns)


def a_query(number: int = 0) -> Query:
    return Query(
        num_tokens=1000,
        max_tokens=100,
        num_blocks=62,
        block_size=16,
        priority=0,
        number=number,
        expected_output=50,
    )


def predict(num: int) -> RankPredict:
    return RankPredict(np.repeat(PROFILE[:, None], num, axis=1))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    reasons = plugins.check("routing", request.param)
    if reasons:
        pytest.skip("; ".join(reasons))
    return request.param


@pytest.fixture
def policy(name: str) -> Routing:
    return plugins.build("routing", name)


def test_the_policies_of_the_tree_are_found():
    assert {"least_loaded", "predicted_ttft", "random", "round_robin"} <= set(NAMES)


@pytest.mark.parametrize("num", [1, 2, 7, 2000])
def test_scores_are_one_finite_number_per_candidate(policy: Routing, num: int):
    for number in range(5):
        scores = policy.score(a_query(number), candidates(num, number), predict(num))
        assert scores.shape == (num,)
        assert scores.dtype == np.float64
        assert np.isfinite(scores).all()


def test_columns_are_read_and_not_written(policy: Routing):
    offered = candidates(20)
    before = {f: np.copy(getattr(offered, f)) for f in Candidates.__dataclass_fields__}
    policy.score(a_query(), offered, predict(20))
    for field, value in before.items():
        assert np.array_equal(getattr(offered, field), value), field


def test_two_of_a_kind_decide_alike(name: str):
    one, two = plugins.build("routing", name), plugins.build("routing", name)
    for number in range(30):
        offered = candidates(9, number)
        scores = [p.score(a_query(number), offered, predict(9)) for p in (one, two)]
        assert np.array_equal(*scores)


def test_the_order_of_ranks_that_are_not_offered_does_not_matter(name: str):
    """Scores are a function of the candidates: asking twice in a row from fresh gives the same."""
    offered = candidates(12)
    one = plugins.build("routing", name).score(a_query(3), offered, predict(12))
    two = plugins.build("routing", name).score(a_query(3), offered, predict(12))
    assert np.array_equal(one, two)

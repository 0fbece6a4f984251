"""llmd_weighted: a sum of scores between 0 and 1."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.errors import ConfigError
from rtp.policies.check import a_predictor as predict
from rtp.policies.check import a_query
from tests.policies.test_routing import equal, winner


def test_the_sum_by_hand():
    offered = equal(
        3,
        matched_tokens=np.array([496.0, 0.0, 992.0]),  # 31, 0 and 62 of 62 blocks
        num_requests=np.array([12.0, 2.0, 14.0]),
        decode_rows=np.array([8.0, 2.0, 4.0]),  # queues of 4, 0 and 10
        kv_free=np.array([50.0, 100.0, 25.0]),
        kv_total=np.full(3, 100.0),
    )
    scores = plugins.build("routing", "llmd_weighted").score(a_query(), offered, predict(3))
    draw = scores[1] - 3.0
    assert scores == pytest.approx([1 + 1.2 + 0.5, 0 + 2 + 1 + draw, 2 + 0 + 0.25])
    assert 0 <= draw < 1
    assert winner("llmd_weighted", offered, prefix=3.0, queue=2.0, kv=0.0) == 2  # 2.7, 2 and 3


def test_equal_sums_are_drawn_evenly_and_no_others():
    offered = equal(4, kv_free=np.array([5.0, 4.0, 5.0, 5.0]), kv_total=np.full(4, 9.0))
    policy = plugins.build("routing", "llmd_weighted")
    scores = [policy.score(a_query(number), offered, predict(4)) for number in range(600)]
    draws = Counter(int(each.argmax()) for each in scores)
    assert set(draws) == {0, 2, 3}
    assert all(150 < count < 250 for count in draws.values())


@pytest.mark.parametrize("params", [{"prefix": -1.0}, {"seed": 0.5}])
def test_nonsense_is_refused(params: dict[str, float]):
    with pytest.raises(ConfigError, match=r"llmd_weighted.* takes? "):
        plugins.build("routing", "llmd_weighted", **params)

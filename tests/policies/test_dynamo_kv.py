"""dynamo_kv: blocks to compute less blocks held, plus blocks to decode from."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.errors import ConfigError
from rtp.policies.check import a_predictor as predict
from rtp.policies.check import a_query
from tests.policies.test_routing import equal, winner


def test_the_cost_by_hand():
    offered = equal(
        3,
        matched_tokens=np.array([0.0, 320.0, 0.0]),
        host_tokens=np.array([0.0, 480.0, 640.0]),
        prefill_tokens=np.array([0.0, 1600.0, 160.0]),
        context_tokens=np.array([3200.0, 0.0, 1600.0]),
        num_requests=np.array([9.0, 1.0, 2.0]),
    )
    # 62.5 + 262.5;  162.5 - 20 - 0.75 * 10 + 62.5;  72.5 - 0.75 * 40 + 162.5;  and a request's 2
    policy = plugins.build("routing", "dynamo_kv", request_weight=2.0)
    scores = policy.score(a_query(), offered, predict(3))
    draw = scores[1] + 199.5
    assert scores == pytest.approx([-343.0, -199.5 + draw, -209.0])
    assert 0 <= draw < 1
    assert winner("dynamo_kv", offered) == 1
    assert winner("dynamo_kv", offered, decode_scale=0.0) == 2  # 62.5, 135 and 42.5


def test_equal_costs_are_drawn_evenly_and_no_others():
    offered = equal(4, context_tokens=np.array([0.0, 16.0, 0.0, 0.0]))
    policy = plugins.build("routing", "dynamo_kv")
    scores = [policy.score(a_query(number), offered, predict(4)) for number in range(600)]
    draws = Counter(int(each.argmax()) for each in scores)
    assert set(draws) == {0, 2, 3}
    assert all(150 < count < 250 for count in draws.values())


@pytest.mark.parametrize("params", [{"overlap_weight": -1.0}, {"seed": 0.5}])
def test_nonsense_is_refused(params: dict[str, float]):
    with pytest.raises(ConfigError, match=r"dynamo_kv.* takes? "):
        plugins.build("routing", "dynamo_kv", **params)

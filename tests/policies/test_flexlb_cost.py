"""flexlb_cost: predicted milliseconds among what its filters leave, drawn within a band."""

from __future__ import annotations

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.errors import ConfigError
from rtp.core.policy import Candidates
from rtp.policies.check import a_predictor as predict
from rtp.policies.check import a_query
from tests.policies.test_routing import equal


def drawn(offered: Candidates, **params: float) -> set[int]:
    policy, num = plugins.build("routing", "flexlb_cost", **params), len(offered.rank_ids)
    return {int(policy.score(a_query(i), offered, predict(num)).argmax()) for i in range(100)}


def test_a_draw_among_costs_within_ten_percent_or_twenty_ms():
    # Each prefill takes 11.05 ms.
    waits = np.array([0.1, 0.119, 0.121, 0.3])  # least 111.05: 20 ms above is 131.05
    assert drawn(equal(4, wait_s=waits)) == {0, 1}
    waits = np.array([1.0, 1.1, 1.102, 1.3])  # least 1011.05: 10 % above is 1112.155
    assert drawn(equal(4, wait_s=waits)) == {0, 1}
    assert drawn(equal(4, wait_s=waits), band=0.0, band_s=0.0) == {0}


def test_a_hit_beyond_the_band_wins():
    matched = np.array([0.0, 0.0, 960.0])  # 1 + 0.4 + 0.004 ms
    assert drawn(equal(3, matched_tokens=matched), band_s=0.001) == {2}
    assert drawn(equal(3, matched_tokens=matched)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("busy", "others", "dropped"),
    [
        (63.0, 40.0, False),
        (64.0, 40.0, True),  # the limit
        (45.0, 5.0, False),  # mean 15: exactly three times
        (46.0, 5.0, True),
    ],
)
def test_ranks_with_too_many_requests_are_dropped(busy: float, others: float, dropped: bool):
    """Of four, or three times the mean could not be passed; the busy one has the hit."""
    offered = equal(
        4,
        num_requests=np.array([others, busy, others, others]),
        matched_tokens=np.array([0.0, 960.0, 0.0, 0.0]),
    )
    assert drawn(offered, band=0.0, band_s=0.0) == ({0, 2, 3} if dropped else {1})


def test_a_rank_with_over_three_times_the_mean_wait_is_dropped():
    """Even where its hit makes it the cheapest."""
    matched = np.array([0.0, 0.0, 0.0, 0.0, 960.0])
    for wait_s, ranks in ((0.006, {4}), (0.0061, {0, 1, 2, 3})):
        waits = np.array([0.001, 0.001, 0.001, 0.001, wait_s])  # mean 2 ms at 6 ms
        offered = equal(5, matched_tokens=matched, wait_s=waits)
        assert drawn(offered, band=0.0, band_s=0.0) == ranks


def test_where_all_are_dropped_the_shortest_wait_is_kept():
    offered = equal(3, num_requests=np.full(3, 64.0), wait_s=np.array([0.03, 0.02, 0.025]))
    assert drawn(offered) == {1}


@pytest.mark.parametrize("params", [{"band": -0.1}, {"seed": 0.5}])
def test_nonsense_is_refused(params: dict[str, float]):
    with pytest.raises(ConfigError, match=r"flexlb_cost.* takes? "):
        plugins.build("routing", "flexlb_cost", **params)

"""sglang_cache_aware: balance first, then the match, then the emptiest pool."""

from __future__ import annotations

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.errors import ConfigError
from tests.policies.test_routing import equal, winner


@pytest.mark.parametrize(
    ("requests", "rank"),
    [
        ((64.0, 0.0), 0),  # 64 apart is balanced: the holder
        ((65.0, 0.0), 1),  # 65 apart, any ratio over none
        ((195.0, 130.0), 0),  # 65 apart, exactly 1.5 times
        ((196.0, 130.0), 1),  # over 1.5 times
    ],
)
def test_imbalance_overrides_the_match(requests: tuple[float, float], rank: int):
    offered = equal(2, matched_tokens=np.array([960.0, 0.0]), num_requests=np.array(requests))
    assert winner("sglang_cache_aware", offered) == rank


@pytest.mark.parametrize(("matched", "rank"), [(300.0, 1), (301.0, 0)])
def test_a_match_counts_above_three_tenths_of_the_prompt(matched: float, rank: int):
    """Below, the smallest cache: 8,000 tokens in use against 9,000."""
    offered = equal(
        2,
        matched_tokens=np.array([matched, 0.0]),
        kv_free=np.array([11_000.0, 2000.0]),
        kv_total=np.array([20_000.0, 10_000.0]),
    )
    assert winner("sglang_cache_aware", offered) == rank


@pytest.mark.parametrize("params", [{"cache_threshold": 1.1}, {"balance_rel": 0.5}])
def test_thresholds_out_of_range_are_refused(params: dict[str, float]):
    with pytest.raises(ConfigError, match="cache_threshold"):
        plugins.build("routing", "sglang_cache_aware", **params)

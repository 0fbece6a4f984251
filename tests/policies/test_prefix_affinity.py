"""prefix_affinity follows the prefix until its holder carries too much."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.errors import ConfigError
from tests.policies.test_routing import equal, winner


def test_the_longest_match_wins_up_to_its_share_of_the_load():
    matched = np.array([0.0, 960.0, 480.0])
    # Mean m of (0, x, 2000) is (x + 2000) / 3; the bound is 1.25 m + 1000: x <= 3142.
    for load, rank in ((3140.0, 1), (3145.0, 2)):
        loads = np.array([0.0, load, 2000.0])
        offered = equal(3, matched_tokens=matched, prefill_tokens=loads)
        assert winner("prefix_affinity", offered) == rank
    loads = np.array([0.0, 3145.0, 2000.0])  # pages that decode count alike
    offered = equal(3, matched_tokens=matched, context_tokens=loads)
    assert winner("prefix_affinity", offered) == 2
    assert winner("prefix_affinity", offered, spread=2.0) == 1


def test_a_head_that_all_prompts_share_does_not_draw_all_to_one_rank():
    """The last grant to a rank finds it at 1.25 * 39 / 4 + 1 = 13.2 prompts at most."""
    matched, loads = np.zeros(4), np.zeros(4)
    counts = np.zeros(4, dtype=int)
    for _ in range(40):
        offered = equal(4, matched_tokens=matched.copy(), context_tokens=loads.copy())
        rank = winner("prefix_affinity", offered)
        matched[rank] = 480.0
        loads[rank] += 1000.0
        counts[rank] += 1
    assert counts.max() <= 14


@pytest.mark.parametrize("spread", [0.9, -1.0, nan])
def test_a_spread_below_one_is_refused(spread: float):
    with pytest.raises(ConfigError, match="spread"):
        plugins.build("routing", "prefix_affinity", spread=spread)

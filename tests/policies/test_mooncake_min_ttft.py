"""mooncake_min_ttft: wait, then compute or pull what is missing, whichever is sooner."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.errors import ConfigError
from rtp.policies.check import a_predictor as predict
from rtp.policies.check import a_query
from tests.policies.test_routing import equal, winner

# The holder computes 200 tokens after 800: 1 + 2 + 0.018 = 3.018 ms, after a wait of 10 ms; the
# other one all of 1000: 1 + 10 + 0.05 = 11.05 ms.
OFFERED = equal(
    2,
    matched_tokens=np.array([800.0, 0.0]),
    best_tokens=800.0,
    wait_s=np.array([0.01, 0.0]),
)


@pytest.mark.parametrize(
    ("rate", "seconds"),
    [
        (0.0, 0.01105),  # no pull
        (200_000.0, 0.004 + 0.003018),  # 800 tokens in 4 ms
        (80_000.0, 0.01105),  # 10 ms: computing is sooner
    ],
)
def test_the_estimate_by_hand(rate: float, seconds: float):
    policy = plugins.build("routing", "mooncake_min_ttft", pull_tokens_per_s=rate)
    scores = policy.score(a_query(), OFFERED, predict(2))
    assert scores == pytest.approx([-0.013018, -seconds])


def test_a_pull_lets_a_free_rank_beat_the_holder():
    waits = np.array([0.006, 0.0])
    offered = equal(
        2, matched_tokens=OFFERED.matched_tokens, best_tokens=OFFERED.best_tokens, wait_s=waits
    )
    assert winner("mooncake_min_ttft", offered) == 0  # 9.018 against 11.05 ms
    assert winner("mooncake_min_ttft", offered, pull_tokens_per_s=200_000.0) == 1  # 7.018 ms


@pytest.mark.parametrize("rate", [-1.0, nan])
def test_a_rate_below_zero_is_refused(rate: float):
    with pytest.raises(ConfigError, match="pull_tokens_per_s"):
        plugins.build("routing", "mooncake_min_ttft", pull_tokens_per_s=rate)

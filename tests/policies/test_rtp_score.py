"""rtp_score is the paper's formula, and its weights decide between a hit and a wait."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.errors import ConfigError
from rtp.policies.check import a_predictor as predict
from rtp.policies.check import a_query
from tests.policies.test_routing import equal, winner

# Prefills: 1 + 10 + 0.05 = 11.05 ms for all of 1000; 1 + 2 + 0.018 = 3.018 ms for 200 after 800.
TOKENS = {"matched_tokens": np.array([0.0, 800.0]), "best_tokens": 900.0}


def test_the_formula_by_hand():
    offered = equal(2, **TOKENS, wait_s=np.array([0.0, 0.01]))
    policy = plugins.build("routing", "rtp_score", alpha=0.5, beta=0.1, gamma=1.0)
    # latencies 11.05 ms and 13.018 ms; remote 900 and 100
    expected = [0.1 * 0.9 - 11.05 / 13.018, 0.5 * 0.8 + 0.1 * 0.1 - 1.0]
    assert policy.score(a_query(), offered, predict(2)) == pytest.approx(expected)


def test_literal_gives_every_rank_the_same_remote_match():
    offered = equal(2, **TOKENS, wait_s=np.array([0.0, 0.01]))
    policy = plugins.build("routing", "rtp_score", alpha=0.5, beta=0.1, gamma=1.0, literal=True)
    expected = [0.09 - 11.05 / 13.018, 0.4 + 0.09 - 1.0]
    assert policy.score(a_query(), offered, predict(2)) == pytest.approx(expected)


def test_only_the_ratio_of_alpha_less_beta_to_gamma_matters():
    # waits 40 ms: latencies 11.05 and 43.018, shares 0.257 and 1: the hit must be worth 0.743 / 0.8
    offered = equal(2, **TOKENS, wait_s=np.array([0.0, 0.04]))
    for scale in (0.01, 1.0, 100.0):
        less = {"alpha": 1.0 * scale, "beta": 0.1 * scale, "gamma": scale}
        more = {"alpha": 1.1 * scale, "beta": 0.1 * scale, "gamma": scale}
        assert winner("rtp_score", offered, **less) == 0
        assert winner("rtp_score", offered, **more) == 1


@pytest.mark.parametrize(
    "params",
    [{"alpha": 0.1, "beta": 0.1}, {"beta": -1.0}, {"gamma": nan}, {"alpha": inf}, {"gamma": -1.0}],
)
def test_weights_that_make_no_sense_are_refused(params: dict[str, float]):
    with pytest.raises(ConfigError, match="beta < alpha"):
        plugins.build("routing", "rtp_score", **params)

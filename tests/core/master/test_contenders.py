"""A monotone policy is shown only the ranks that can win: it decides as if it saw all of them."""

from __future__ import annotations

import pytest

from rtp.core.policy import Routing
from rtp.policies.routing.predicted_ttft import PredictedTtft
from tests.replay.decisions import decision_log


def build() -> Routing:
    """The default policy without its promise."""
    return PredictedTtft(monotone=False)


@pytest.mark.parametrize("seed", range(6))
def test_it_decides_as_if_it_saw_all(seed: int):
    assert decision_log("predicted_ttft", seed) == decision_log(__name__, seed)

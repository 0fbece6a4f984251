"""Every routing policy under early and under late binding, and what the default reaches."""

from __future__ import annotations

import numpy as np
import pytest

from rtp.core import plugins
from tests.replay.fleet import alone_s, p95, prefill_only
from tests.support.traces import conversation, sample

POLICIES = plugins.names("routing")


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_a_trace_either_way(name: str, early: bool):
    rows = sample()[:24]
    run = prefill_only(rows, plugins.build("routing", name), speed=20.0, early=early)
    assert run.ok.all()
    waited = run.waited_s.max()
    assert waited < 0.1 if early else waited > 0.5, "late: more come at once than there are ranks"


@pytest.mark.slow
def test_the_default_keeps_its_targets_at_one_and_a_half_times_the_load():
    """bench.policies has the other loads."""
    rows = conversation()
    run = prefill_only(rows, speed=1.5)
    assert p95(run) < 6.1
    assert np.mean(run.ttft_s <= 1.0 + 2.0 * alone_s(rows)) > 0.98
    assert run.ttft_s.max() < 45.0

"""What the fidelity benchmark compares, without a machine to compare."""

from __future__ import annotations

import numpy as np
import pytest

from bench import fidelity
from rtp.core.replayed import FAILED_TYPE, Replayed
from rtp.core.trace import TraceRow

WORKER = fidelity.Worker((0.004, 0.001, 1e-7, 0.015, 0.001, 1e-7), 32_000)


def a_run(ttft_s: float) -> Replayed:
    arrival = np.arange(10.0)
    return Replayed(
        arrival_s=arrival,
        granted_s=arrival,
        first_s=arrival + ttft_s,
        ended_s=arrival + ttft_s + 1.0,
        ranks=np.zeros(10, dtype=np.int64),
        prompt_tokens=np.full(10, 100),
        cached_tokens=np.zeros(10, dtype=np.int64),
        output_tokens=np.full(10, 5),
        attempts=np.ones(10, dtype=np.int64),
        failed=np.full(10, "", dtype=FAILED_TYPE),
    )


def draws(ttft_s: float) -> list[Replayed]:
    """Three, of which the one in the middle counts."""
    return [a_run(0.1), a_run(ttft_s), a_run(9.0)]


def test_a_figure_may_be_off_by_a_fifth_or_by_twice_the_spread_of_the_live_runs():
    steady = fidelity.claims([a_run(1.0), a_run(1.0), a_run(1.0)], draws(1.25))
    assert [claim.target for claim in steady] == [0.2, 0.2, 0.2]
    assert steady[0].value == pytest.approx(0.25)
    assert not steady[0].holds
    unsteady = fidelity.claims([a_run(0.8), a_run(1.0), a_run(1.2)], draws(1.25))
    assert unsteady[0].target == pytest.approx(0.8)
    assert unsteady[0].holds


def test_a_load_is_found_at_which_simulated_workers_are_busy_as_much_as_wanted():
    rows = [TraceRow(0.5 * i, 200, 20, tuple(range(13 * i, 13 * i + 13))) for i in range(40)]
    speed = fidelity.speed_for(rows, WORKER)
    assert fidelity.simulated(rows, speed, WORKER)[1] == pytest.approx(0.7, abs=0.05)
    slower = fidelity.speed_for(rows, WORKER.slower(2.0))
    assert slower == pytest.approx(speed / 2, rel=0.1)


def test_first_tokens_come_later_by_the_time_on_the_way_of_two_messages():
    rows = [TraceRow(10.0 * i, 200, 1, tuple(range(13 * i, 13 * i + 13))) for i in range(5)]
    near, far = (fidelity.simulated(rows, 1.0, w)[0] for w in (WORKER, WORKER.farther(0.04)))
    later_s = fidelity.median_ttft_s([far]) - fidelity.median_ttft_s([near])
    assert later_s == pytest.approx(0.04, abs=0.005)
    assert WORKER.farther(-1.0) == WORKER, "nobody answers before it was asked"

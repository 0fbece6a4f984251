"""Whole clusters on a trace, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from rtp.core.trace import TraceRow
from tests.replay.fleet import alone_s, prefill_only
from tests.support.traces import sample

TRIP_S = 0.01
"""Messages there and back, and the tick between."""


def test_prompts_that_share_nothing_take_their_time_alone():
    rows = [TraceRow(20.0 * i, 5000 + i, 4, tuple(range(10 * i, 10 * i + 10))) for i in range(5)]
    run = prefill_only(rows)
    assert run.hit_ratio == 0.0
    np.testing.assert_allclose(run.ttft_s, alone_s(rows), atol=TRIP_S)
    assert all(outcome.ended is not None and len(outcome.ids) == 1 for outcome in run.outcomes)


def test_a_second_turn_finds_the_blocks_of_the_first():
    rows = [TraceRow(0.0, 5120, 1, tuple(range(10))), TraceRow(9.0, 6000, 1, tuple(range(12)))]
    run = prefill_only(rows)
    assert run.new_tokens.tolist() == [5120, 880]
    assert run.ranks[0] == run.ranks[1]


def test_t01_speed_divides_the_times_of_arrival():
    rows = [TraceRow(10.0, 100, 1, (0,)), TraceRow(30.0, 100, 1, (1,))]
    begun = [o.begun_at for o in prefill_only(rows, speed=2.0).outcomes]
    assert begun[1] - begun[0] == pytest.approx(10.0)


def test_t03_requests_of_one_instant_arrive_together():
    rows = [TraceRow(3.0, 2000, 1, tuple(range(4 * i, 4 * i + 4))) for i in range(4)]
    run = prefill_only(rows)
    assert len({o.begun_at for o in run.outcomes}) == 1
    assert sorted(run.ranks.tolist()) == [0, 1, 2, 3]


def test_bound_early_requests_are_granted_as_they_come():
    rows = [TraceRow(0.0, 20_000, 1, tuple(range(40 * i, 40 * i + 40))) for i in range(24)]
    early, late = prefill_only(rows, early=True), prefill_only(rows)
    assert early.waited_s.max() < TRIP_S
    assert late.waited_s.max() > 1.0
    assert not np.isnan(early.ttft_s).any()


def test_a_replay_repeats_byte_for_byte():
    rows = sample()[:60]
    first, again = prefill_only(rows), prefill_only(rows)
    assert repr(first.outcomes) == repr(again.outcomes)

"""The watch on a loop: lateness, and garbage collected on purpose instead of by chance."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from rtp.io import clock
from rtp.io.clock import LoopTimes, LoopWatch


class Time:
    now = 100.0


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock, "now", lambda: time.now)
    return time


class Knot:
    """Garbage only a collector finds."""

    def __init__(self) -> None:
        self.me = self


def test_turns_are_summed_and_the_worst_is_kept():
    times = LoopTimes()
    for cpu_s in (0.001, 0.005, 0.002):
        times.turn(cpu_s)
    facts = times.as_dict()
    assert facts["turns"] == 3
    assert facts["cpu_s"] == pytest.approx(0.008)
    assert facts["max_turn_cpu_s"] == 0.005


async def test_lateness_is_how_long_after_its_time_a_sample_comes(time: Time):
    times = LoopTimes()
    watch = LoopWatch(times)
    for late in (0.0, 0.2, 0.1):
        time.now += clock.SAMPLE_S + late
        watch._timer.cancel()
        watch._sample()
    assert times.samples == 3
    assert times.late_s == pytest.approx(0.3)
    assert times.max_late_s == pytest.approx(0.2)
    watch.close()


async def test_after_settling_garbage_goes_in_quiet_moments(time: Time):
    times = LoopTimes()
    watch = LoopWatch(times)
    watch.settle()
    try:
        assert not gc.isenabled()
        knot = weakref.ref(Knot())
        time.now += clock.COLLECT_S * 1.1
        times.turns += clock.QUIET_TURNS + 1
        watch._maybe_collect()
        assert knot() is not None
        watch._maybe_collect()  # no turn since: quiet
        assert knot() is None
        assert times.collections == 1
        knot = weakref.ref(Knot())
        time.now += clock.COLLECT_BY_S * 1.1
        times.turns += clock.QUIET_TURNS + 1
        watch._maybe_collect()  # busy for too long
        assert knot() is None
    finally:
        watch.close()
    assert gc.isenabled()


async def test_a_loop_whose_turns_are_few_and_long_is_not_quiet(time: Time):
    times = LoopTimes()
    watch = LoopWatch(times)
    watch.settle()
    try:
        knot = weakref.ref(Knot())
        time.now += clock.COLLECT_S * 1.1
        times.turn(clock.QUIET_S * 1.1)
        watch._maybe_collect()
        assert knot() is not None
        watch._maybe_collect()
        assert knot() is None
    finally:
        watch.close()


async def test_a_busy_loop_collects_what_has_grown_in_number(time: Time):
    times = LoopTimes()
    watch = LoopWatch(times)
    watch.settle()
    try:
        knots = [Knot() for _ in range(clock.MOST_GROWN + 1)]
        knot = weakref.ref(Knot())
        times.turn(clock.QUIET_S * 1.1)
        watch._maybe_collect()
        assert knot() is None
        assert len(knots) == clock.MOST_GROWN + 1
    finally:
        watch.close()


async def test_older_garbage_goes_when_nothing_happens(time: Time):
    times = LoopTimes()
    watch = LoopWatch(times)
    watch.settle()
    try:
        knot = Knot()
        old = weakref.ref(knot)
        gc.collect(1)  # it survives into the oldest generation
        del knot
        time.now += clock.COLLECT_S * 1.1
        watch._maybe_collect()
        assert old() is not None
        time.now += clock.FULL_S
        watch._maybe_collect()
        assert old() is None
    finally:
        watch.close()
    await asyncio.sleep(0)


async def test_the_threads_share_of_a_core_is_told_now_and_then(
    time: Time, monkeypatch: pytest.MonkeyPatch
):
    told: list[float] = []
    cpu = 5.0
    monkeypatch.setattr(clock.time, "thread_time", lambda: cpu)
    times = LoopTimes()
    watch = LoopWatch(times, told.append)
    for _ in range(2 * clock.BUSY_SAMPLES):
        time.now += clock.SAMPLE_S
        cpu += 0.9 * clock.SAMPLE_S
        watch._timer.cancel()
        watch._sample()
    assert told == pytest.approx([0.9, 0.9])
    assert times.busy == told[-1]
    watch.close()

"""A step that hangs is noticed while it does."""

from __future__ import annotations

import pytest

from rtp.core.commands import Note
from rtp.core.steps import Known, Row, StepPlan
from rtp.core.types import pack_ids
from rtp.io import stall
from rtp.io.stall import FATAL_S, FLOOR_S, StallWatch, predicted_s

PROFILE = (0.1, 0.01, 0.0, 0.5, 0.1, 0.001)
IGNORE = (lambda note: None, lambda hung: None, lambda reason: None)


def plan(step: int, *rows: tuple[int, int]) -> StepPlan:
    """rows: (start, num_new)."""
    made = (Row(0, start, new, Known(pack_ids([0] * new)), b"", 0) for start, new in rows)
    return StepPlan(step, tuple(made))


class Time:
    """A clock that stands until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(stall, "now", lambda: self.now)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def test_prediction_adds_prefill_and_decode():
    assert predicted_s(plan(0, (0, 20)), PROFILE) == pytest.approx(0.1 + 0.2)
    assert predicted_s(plan(0, (50, 1), (30, 1)), PROFILE) == pytest.approx(0.5 + 0.2 + 0.08)
    assert predicted_s(plan(0, (0, 20), (30, 1)), PROFILE) == pytest.approx(0.3 + 0.63)
    assert predicted_s(plan(0, (0, 20)), ()) == 0.0


async def test_a_hung_step_is_noted_once_and_until_it_ends(time: Time):
    notes: list[Note] = []
    fatal: list[str] = []
    changes: list[bool] = []
    watch = StallWatch(PROFILE, notes.append, changes.append, fatal.append)
    watch.begun(0, plan(7, (0, 90)))  # 1 s, so 5 s are allowed
    time.now += 4.9
    watch._look()
    assert watch.stalled() == ""
    assert (notes, changes) == ([], [])
    time.now += 0.2
    watch._look()
    watch._look()
    assert watch.stalled() == "step 7 hangs"
    assert [n.event for n in notes] == ["step.hung"]
    assert (fatal, changes) == ([], [True])
    time.now += FATAL_S
    watch._look()
    assert fatal == ["rank 0: step 7 hangs since 65 s"]
    watch.done(0, 7)
    watch.done(0, 7)
    assert watch.stalled() == ""
    assert changes == [True, False]
    watch.close()


async def test_short_steps_have_a_floor(time: Time):
    watch = StallWatch(PROFILE, *IGNORE)
    watch.begun(0, plan(1, (0, 1)))
    time.now += FLOOR_S + 0.9  # 5 x 0.6 s are allowed
    watch._look()
    assert not watch.stalled()
    watch.close()
    quick = StallWatch((), *IGNORE)
    quick.begun(0, plan(1, (0, 1)))
    time.now += FLOOR_S * 0.9
    quick._look()
    assert not quick.stalled()
    time.now += FLOOR_S * 0.2
    quick._look()
    assert quick.stalled()
    quick.close()


async def test_a_step_in_flight_behind_another_has_its_time_too(time: Time):
    watch = StallWatch(PROFILE, *IGNORE)
    watch.begun(0, plan(1, (0, 90)))
    watch.begun(0, plan(2, (0, 90)))
    time.now += 1.0
    watch.done(0, 1)
    time.now += 4.9
    watch._look()
    assert not watch.stalled()
    time.now += 0.2
    watch._look()
    assert watch.stalled() == "step 2 hangs"
    watch.close()


async def test_hung_is_until_the_last_step_that_hangs_has_ended(time: Time):
    changes: list[bool] = []
    watch = StallWatch((), lambda note: None, changes.append, lambda reason: None)
    for rank in range(3):
        watch.begun(rank, plan(1, (0, 1)))
    time.now += FLOOR_S + 0.1
    watch._look()
    assert changes == [True]
    watch.done(0, 1)
    watch.done(2, 1)
    assert changes == [True]
    assert watch.stalled()
    watch.done(1, 1)
    assert changes == [True, False]
    watch.close()

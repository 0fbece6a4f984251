"""A lasting trouble is told of at once and once a minute."""

from __future__ import annotations

from rtp.io.reminder import AGAIN_S, KEPT, Reminder


def test_a_trouble_is_told_at_once_and_once_a_minute():
    at = [0.0]
    reminder = Reminder(lambda: at[0])
    told = []
    for second in range(180):
        at[0] = float(second)
        if reminder.due("no Master"):
            told.append(second)
    assert told == [0, AGAIN_S, 2 * AGAIN_S]
    assert reminder.due("another trouble")
    reminder.over()
    assert reminder.due("no Master")


def test_it_remembers_a_bounded_number():
    reminder = Reminder(lambda: 0.0)
    for number in range(KEPT + 1):
        assert reminder.due(str(number))
    assert not reminder.due(str(KEPT))
    assert reminder.due("0"), "forgotten"

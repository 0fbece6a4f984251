"""The order of waiting requests, against a plain reading of its rule; holds; deadlines."""

from __future__ import annotations

import random

from rtp.core.master.window import OVERDUE_EVERY, OVERDUE_S, OVERDUE_SERVICES, Waiting, Window
from rtp.core.messages import Ask
from rtp.core.types import FrontendId, RequestId

NO_LIMIT = float("inf")


def a_waiting(id: str, arrival: float = 0.0, priority: int = 0, deadline: float = 1e9) -> Waiting:
    ask = Ask(FrontendId("f"), RequestId(id), 1, "m", "", "", priority, b"", 10, 10, 1, 600.0)
    return Waiting(ask, arrival, deadline)


def a_window(*waiting: Waiting, service_s: float = 1.0) -> Window:
    window = Window()
    for one in waiting:
        window.add(one, 10, service_s, 20)
    return window


def order(window: Window, now: float) -> list[str]:
    ids = []
    while (best := window.best(now, NO_LIMIT)) is not None:
        ids.append(best.ask.request_id)
        window.remove(best)
    return ids


def test_short_work_goes_first_and_age_lifts_long_work():
    short, long = a_waiting("short", arrival=9.0), a_waiting("long", arrival=0.0)
    window = Window()
    window.add(long, 1000, 10.0, 1000)
    window.add(short, 10, 0.1, 20)
    assert window.best(10.0, NO_LIMIT) is short  # 1/0.1 over 10/10
    assert window.best(9.05, NO_LIMIT) is long  # 0.05/0.1 under 9.05/10


def test_four_levels_of_priority_double_the_ratio():
    low, high = a_waiting("low", arrival=0.0, priority=0), a_waiting("high", 5.1, priority=4)
    window = a_window(low, high)
    assert window.best(10.0, NO_LIMIT) is low  # 10 over 2 * 4.9
    assert window.best(10.5, NO_LIMIT) is high  # 10.5 under 2 * 5.4


def test_priority_is_clamped():
    window = a_window(a_waiting("b", priority=16), a_waiting("a", priority=4_000))
    assert order(window, 1.0) == ["a", "b"], "equal then, so by id"


def test_ties_go_by_arrival_then_id():
    window = a_window(*(a_waiting(id) for id in "dbca"))
    assert order(window, 0.0) == ["a", "b", "c", "d"]


def test_equal_ratios_of_different_ages_go_by_arrival():
    window = a_window(a_waiting("a", 9.0, priority=4), a_waiting("z", 8.0))
    assert order(window, 10.0) == ["z", "a"]  # 2 * 1 and 1 * 2


def test_the_argmax_equals_a_plain_reading_of_the_rule():
    rng = random.Random(4)
    window, plain = Window(), {}
    for step in range(3000):
        now = step * 0.01
        if rng.random() < 0.55:
            priority = rng.randrange(-20, 20)
            waiting = a_waiting(f"{step:05d}", now - rng.random(), priority)
            service = rng.choice([0.01, 0.1, 1.0])
            window.add(waiting, 10, service, rng.choice([10, 1000]))
            plain[step] = waiting
        elif plain and rng.random() < 0.3:
            window.remove(plain.pop(rng.choice(list(plain))))
        else:
            room = rng.choice([NO_LIMIT, 100.0])
            window.num_grants = 0
            best = window.best(now, room)
            among = [(k, w) for k, w in plain.items() if window.need(w) <= room]
            if not among:
                assert best is None
                continue

            def ratio(item: tuple[int, Waiting], now: float = now) -> float:
                waiting = item[1]
                level = max(-16, min(16, waiting.ask.priority))
                return (now - waiting.arrival) * (2.0 ** (level / 4) / waiting.service_s)

            top = max(map(ratio, among))
            key, expected = min(
                (item for item in among if ratio(item) == top),
                key=lambda item: (item[1].arrival, item[1].ask.request_id),
            )
            assert best is expected
            window.remove(plain.pop(key))
    assert window.num_waiting == len(plain)
    assert window.num_tokens == 10 * len(plain)


def test_every_fourth_grant_goes_to_the_oldest_overdue_request():
    window = Window()
    old = [a_waiting("old0", 0.0), a_waiting("old1", 1.0)]
    for waiting in old:
        window.add(waiting, 10_000, 50.0, 10_000)
    now = max(OVERDUE_S, OVERDUE_SERVICES * 50.0) + 2.0
    granted = []
    for i in range(12):
        window.add(a_waiting(f"new{i:02d}", now - 1), 10, 0.001, 20)
    for _ in range(12):
        best = window.best(now, NO_LIMIT)
        granted.append(best.ask.request_id)
        window.remove(best)
        window.num_grants += 1
    assert [granted.index(id) for id in ("old0", "old1")] == [
        OVERDUE_EVERY - 1,
        2 * OVERDUE_EVERY - 1,
    ]


def test_overdue_needs_both_30_s_and_20_services():
    slow, quick = a_waiting("slow"), a_waiting("quick")
    window = Window()
    window.add(slow, 1, 2.0, 1)
    window.add(quick, 1, 0.1, 1)
    assert window.oldest_overdue(30.0) is None
    assert window.oldest_overdue(30.1) is quick
    assert not window.overdue(slow, 40.0)
    assert window.overdue(slow, 40.1)


def test_what_needs_more_than_the_room_is_passed_by():
    large, small = a_waiting("large", 0.0), a_waiting("small", 5.0)
    window = Window()
    window.add(large, 10, 1.0, 5000)
    window.add(small, 10, 1.0, 50)
    assert window.best(10.0, 100.0) is small
    assert window.best(10.0, 5000.0) is large
    assert window.best(10.0, 10.0) is None


def test_skipped_requests_sit_out_one_round():
    first, second = a_waiting("a"), a_waiting("b")
    window = a_window(first, second)
    window.skip(first)
    assert window.best(1.0, NO_LIMIT) is second
    window.remove(second)
    assert window.best(1.0, NO_LIMIT) is None
    window.unskip()
    assert window.best(1.0, NO_LIMIT) is first


def test_held_requests_block_nobody_and_come_back_when_their_time_is_over():
    held, other = a_waiting("a"), a_waiting("b")
    window = a_window(held, other)
    window.hold(held, 3, until=2.0, seconds=0.5)
    assert window.best(1.0, NO_LIMIT) is other
    assert (window.num_held, window.next_hold, window.held_on(3)) == (1, 2.0, [held])
    assert window.held_too_long(1.9) == []
    assert window.held_too_long(2.0) == [held]
    window.let_go(held)
    assert (window.num_held, window.rows_with_held()) == (0, [])
    assert window.best(1.0, NO_LIMIT) is held


def test_a_second_hold_does_not_end_at_the_time_of_the_first():
    held = a_waiting("a")
    window = a_window(held)
    window.hold(held, 3, until=2.0, seconds=0.5)
    window.let_go(held)
    window.hold(held, 4, until=5.0, seconds=0.5)
    assert window.held_too_long(3.0) == []
    assert window.held_too_long(5.0) == [held]


def test_deadlines_are_told_once_due_and_the_next_one_is_known():
    waiting = [a_waiting(f"{i}", deadline=10.0 + i) for i in range(5)]
    window = a_window(*waiting)
    assert window.next_expiry == 10.0
    assert window.expired(9.9) == []
    late = window.expired(11.5)
    assert late == waiting[:2]
    for one in late:
        window.remove(one)
    assert window.next_expiry == 12.0


def test_slots_are_reused_and_grow():
    window = Window()
    for round in range(5):
        waiting = [a_waiting(f"{round}-{i}", float(i)) for i in range(200)]
        for one in waiting:
            window.add(one, 7, 1.0, 7)
        assert sorted(w.ask.request_id for w in window) == sorted(w.ask.request_id for w in waiting)
        assert {w.slot for w in waiting} == set(range(200)) or round == 0
        for one in waiting:
            window.remove(one)
    assert (window.num_waiting, window.num_tokens, window.service_s) == (0, 0, 0.0)

"""The order of waiting requests, against a plain reading of its rule; holds; deadlines."""

from __future__ import annotations

import random

import msgspec
import pytest

from rtp.core.master import window as window_module
from rtp.core.master.shares import OVERDUE_EVERY, Shares
from rtp.core.master.window import OVERDUE_S, OVERDUE_SERVICES, Waiting, Window
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


@pytest.mark.parametrize("grid_s", [0.0, 1.0])
def test_a_backlog_is_served_in_the_order_of_the_rule(monkeypatch, grid_s: float):
    """Rounds of several looks over many requests, with skips, holds and the oldest overdue, beside
    a window that goes through all of them at every look."""
    rng = random.Random(8)
    few, all_of_them = Window(), Window()
    monkeypatch.setattr(window_module, "MANY", 100)
    monkeypatch.setattr(all_of_them, "_best_of_few", lambda now, room: None)
    now, alive, overdue = 0.0, {}, 0
    for step in range(900):
        now += 0.05
        for n in range(3 if step < 500 else 1):
            arrival = now - rng.random()
            arrival -= arrival % grid_s if grid_s else 0.0
            service_s, need = rng.choice([0.05, 0.2, 1.5]), rng.choice([10, 1000])
            id = f"{step:04d}.{n}"
            alive[id] = [a_waiting(id, arrival), a_waiting(id, arrival)]
            for window, waiting in zip((few, all_of_them), alive[id], strict=True):
                window.add(waiting, 10, service_s, need)
        held = [id for id in alive if alive[id][0].held_row >= 0]
        for _ in range(rng.randrange(8)):
            room = rng.choice([NO_LIMIT, 100.0])
            best = [window.best(now, room) for window in (few, all_of_them)]
            if best[0] is None:
                assert best[1] is None
                break
            assert best[0].ask.request_id == best[1].ask.request_id
            id = best[0].ask.request_id
            overdue += few.overdue(best[0], now)
            what = rng.random()
            for window, waiting in zip((few, all_of_them), alive[id], strict=True):
                if what < 0.6:
                    window.granted(waiting, 0.1)
                    window.remove(waiting)
                elif what < 0.8:
                    window.hold(waiting, 1, now + 1.0, 0.1)
                else:
                    window.skip(waiting)
                if held and what < 0.1:
                    window.let_go(alive[held[0]][window is all_of_them])
            if what < 0.6:
                del alive[id]
            if held and what < 0.1:
                held.pop(0)
        few.unskip()
        all_of_them.unskip()
    assert few.num_waiting > 100
    assert overdue > 5


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
        window.granted(best, 0.0)
    assert [granted.index(id) for id in ("old0", "old1")] == [
        OVERDUE_EVERY - 1,
        2 * OVERDUE_EVERY - 1,
    ]


def test_overdue_needs_both_30_s_and_20_services():
    slow, quick = a_waiting("slow"), a_waiting("quick")
    window = Window()
    window.add(slow, 1, 2.0, 1)
    window.add(quick, 1, 0.1, 1)
    assert not window.overdue(quick, 30.0)
    assert window.overdue(quick, 30.1)
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


# ---------------------------------------------------------------- several tenants


def a_tenants(id: str, tenant: str, arrival: float, priority: int = 0) -> Waiting:
    waiting = a_waiting(id, arrival, priority)
    waiting.ask = msgspec.structs.replace(waiting.ask, tenant=tenant)
    return waiting


def serve(window: Window, now: float) -> list[str]:
    """Ids in the order of grants, each charged its predicted service."""
    ids = []
    while (best := window.best(now, NO_LIMIT)) is not None:
        ids.append(best.ask.request_id)
        window.granted(best, best.service_s)
        window.remove(best)
    return ids


def test_within_a_tenant_the_order_is_that_of_a_tenant_alone():
    rng = random.Random(6)
    mixed, alone = Window(), {tenant: Window() for tenant in "abc"}
    for i in range(300):
        tenant = rng.choice("abc")
        facts = (f"{tenant}{i:03d}", tenant, rng.random() * 20.0, rng.randrange(-8, 8))
        service = rng.choice([0.01, 0.1, 1.0])
        for window in (mixed, alone[tenant]):
            window.add(a_tenants(*facts), 10, service, 20)
    ids = serve(mixed, 20.0)
    assert len(ids) == 300
    for tenant, window in alone.items():
        assert [id for id in ids if id.startswith(tenant)] == serve(window, 20.0)


def test_the_turn_is_that_of_the_tenant_served_least_that_has_one_that_fits():
    """Against a plain reading, with room, weights and tenants that come and go."""
    rng = random.Random(7)
    weights = {"a": 1.0, "b": 2.0, "c": 0.5}
    window, waiting = Window(Shares(weights.__getitem__)), []
    served, clock = dict.fromkeys(weights, 0.0), 0.0
    for step in range(2000):
        now = step * 0.01
        if rng.random() < 0.5:
            tenant = rng.choice("abc")
            if not any(w.ask.tenant == tenant for w in waiting):
                served[tenant] = max(served[tenant], clock)
            waiting.append(a_tenants(f"{step:05d}", tenant, now))
            window.add(waiting[-1], 10, rng.choice([0.1, 1.0]), rng.choice([10, 1000]))
            continue
        room = rng.choice([NO_LIMIT, 100.0])
        best = window.best(now, room)
        fitting = [w for w in waiting if window.need(w) <= room]
        if not fitting:
            assert best is None
            continue
        least = min(served[w.ask.tenant] for w in fitting)
        among = [w for w in fitting if served[w.ask.tenant] == least]
        assert best in among
        assert best.service_s <= max(w.service_s for w in among)
        tenant = best.ask.tenant
        clock = max(clock, served[tenant])
        served[tenant] += best.service_s / weights[tenant]
        window.granted(best, best.service_s)
        window.remove(best)
        waiting.remove(best)
    assert window.num_waiting == len(waiting)


def test_each_tenants_overdue_requests_have_every_fourth_of_its_grants():
    window, now = Window(), 2000.0
    for tenant in "ab":
        window.add(a_tenants(f"{tenant}-old", tenant, 0.0), 10_000, 50.0, 10_000)
        for i in range(9):
            window.add(a_tenants(f"{tenant}{i}", tenant, now - 1), 10, 0.001, 20)
    ids = serve(window, now)
    for tenant in "ab":
        mine = [id for id in ids if id.startswith(tenant)]
        assert mine.index(f"{tenant}-old") == OVERDUE_EVERY - 1


def test_an_overdue_request_without_room_is_told_when_its_tenants_turn_has_come():
    window, now = Window(), 100.0
    large = a_tenants("large", "a", 0.0)
    window.add(large, 10, 1.0, 5000)
    for _ in range(OVERDUE_EVERY - 1):
        window.granted(large, 0.0)
    window.add(a_tenants("small", "b", 99.0), 10, 0.1, 50)
    assert window.best(now, 100.0) is large
    window.skip(large)
    assert window.best(now, 100.0).ask.request_id == "small"


def test_the_newest_of_a_tenant_is_found_held_or_not():
    window = Window()
    first, last, other = (
        a_tenants("1", "a", 1.0),
        a_tenants("2", "a", 2.0),
        a_tenants("3", "b", 3.0),
    )
    for waiting in (first, last, other):
        window.add(waiting, 10, 1.0, 20)
    window.hold(last, 0, until=9.0, seconds=1.0)
    assert first.standing is not None
    assert window.newest_of(first.standing) is last
    window.remove(last)
    assert window.newest_of(first.standing) is first
    window.remove(first)
    assert window.newest_of(first.standing) is None

"""What the Master is told: registration, Status, Now, grants seen, and the cache by versions."""

from __future__ import annotations

import random

import pytest

from rtp.core.events import From, MasterDown, MasterUp, Stalled
from rtp.core.messages import STATUS_COLUMNS, Delta, Fence, Now, Poll, Snapshot, Status
from rtp.core.worker import cache_report
from rtp.core.worker.reports import SeenGrants
from tests.core.worker.rig import Rig

COLUMN = {name: index for index, name in enumerate(STATUS_COLUMNS)}


def test_registers_once_a_second_until_a_link_is_up():
    rig = Rig(master=False)
    rig.run(3.5)
    assert rig.master.registered == 4
    rig.tell(MasterUp(1))
    rig.run(3.0)
    assert rig.master.registered == 4
    rig.tell(MasterDown())
    rig.run(0.5)
    assert rig.master.registered == 5


def test_an_idle_worker_answers_the_standing_poll_four_times_a_second():
    rig = Rig()
    rig.run(10.0)
    assert 39 <= len(rig.master.statuses) <= 42


def test_a_busy_worker_sends_at_most_one_status_per_period_and_one_unacknowledged():
    rig = Rig(sim_params={"d": 0.001, "e": 0.0, "a": 0.0005})
    rig.submit("a", range(10), 240)
    rig.run(0.1)
    assert 4 <= len(rig.master.statuses) <= 6
    rig.lose = lambda message: isinstance(message, Status)
    before = rig.worker._reports._seq
    rig.run(0.2)
    assert rig.worker._reports._seq == before + 1, "nothing more until it is acknowledged"


def test_o01_a_hung_step_is_told_at_once_though_nothing_ends_or_is_acknowledged():
    rig = Rig(sim_params={"d": 30.0})
    rig.submit("a", range(10), 5)
    rig.run(1.0)
    rig.lose = lambda message: isinstance(message, Status)
    rig.run(0.251)  # a Status is on its way, unacknowledged
    rig.lose = lambda message: False
    before = len(rig.master.statuses)
    rig.tell(Stalled(True))
    rig.tell(Stalled(True))
    assert [status.hung for status in rig.master.statuses[before:]] == [True]
    assert rig.worker.overview()["hung"]
    rig.run(1.0)
    assert all(status.hung for status in rig.master.statuses[before:])
    assert len(rig.master.statuses) >= before + 4, "with every beat"
    before = len(rig.master.statuses)
    rig.tell(Stalled(False))
    assert [status.hung for status in rig.master.statuses[before:]] == [False]


def test_o01_a_master_that_comes_while_a_step_hangs_is_told_first():
    rig = Rig(master=False)
    rig.tell(Stalled(True))
    assert rig.worker.next_deadline() is not None
    rig.run(0.5)
    rig.tell(MasterUp(1))
    rig.tell(From("master", rig.master.poll()))
    assert [status.hung for status in rig.master.statuses] == [True]


def test_the_table_tells_the_load():
    rig = Rig(max_rows=2, max_batch_tokens=16, chunk_while_decoding=16)
    rig.submit("a", range(10), 50)
    rig.submit("b", range(100, 140), 50)
    rig.submit("c", range(200, 220), 50)
    row = rig.master.statuses[0].columns()[0]
    assert row[COLUMN["kv_free"]] == row[COLUMN["kv_total"]] == 256
    rig.run(until=lambda: rig.worker._ranks[0].batcher.load().decode_rows == 1)
    rig.run(0.04)
    row = rig.master.statuses[-1].columns()[0]
    assert row[COLUMN["running"]] == 2
    assert row[COLUMN["waiting"]] == 1
    assert row[COLUMN["decode_rows"]] == 1
    assert row[COLUMN["prefill_tokens"]] == 20 + 40 - 15
    assert row[COLUMN["context_tokens"]] >= 10
    assert row[COLUMN["step_us"]] > 1000
    assert row[COLUMN["granted_upto"]] == 2


def test_a_prompt_in_flight_is_not_computed_and_its_step_has_an_age():
    """One step holds the whole prompt: until it is back the rank is as busy as before it began."""
    rig = Rig(max_batch_tokens=64, sim_params={"a": 0.6})
    rig.submit("a", range(40), 2)
    rig.run(0.55)  # an idle beat or two
    rows = [status.columns()[0] for status in rig.master.statuses]
    busy = [row for row in rows if row[COLUMN["running"]]]
    assert [row[COLUMN["prefill_tokens"]] for row in busy] == [40] * len(busy)
    assert [row[COLUMN["decode_rows"]] for row in busy] == [0] * len(busy)
    ages = [row[COLUMN["step_age_us"]] for row in busy]
    assert ages == sorted(ages)
    assert ages[-1] >= 250_000
    rig.run(1.0)
    row = rig.master.statuses[-1].columns()[0]
    assert row[COLUMN["prefill_tokens"]] == row[COLUMN["step_age_us"]] == 0


def test_first_tokens_and_ends_are_told_at_once_and_repeated_until_acknowledged():
    rig = Rig()
    rig.lose = lambda message: isinstance(message, Now)
    submit = rig.submit("a", range(30), 3)
    rig.assert_finishes(submit)
    rig.run(1.0)
    first, end = rig.master.firsts["a", 0], rig.master.ends["a", 0]
    assert (first.new_tokens, first.cached_tokens) == (30, 0)
    assert first.prefill_s == rig.runners[0].runner._cost.step_s(rig.runners[0].plans[0].rows)
    assert first.queue_s == pytest.approx(0.0, abs=1e-9)
    assert (end.reason, end.prompt_tokens, end.generated) == ("done", 30, 3)
    rig.assert_quiet()
    assert not rig.master.statuses[-1].finished


def test_the_time_in_the_queue_ends_where_the_first_step_begins():
    rig = Rig(max_rows=1, steps_in_flight=2)
    rig.submit("a", range(10), 20)
    rig.submit("b", range(50, 60), 2)
    start = rig.now
    rig.run()
    seconds = [rig.runners[0].runner._cost.step_s(plan.rows) for plan in rig.runners[0].plans]
    first = next(i for i, plan in enumerate(rig.runners[0].plans) if i and plan.started)
    assert rig.master.firsts["b", 0].queue_s == pytest.approx(sum(seconds[:first]))
    assert rig.master.firsts["b", 0].prefill_s == pytest.approx(seconds[first])
    assert rig.now > start


def test_news_survive_a_lost_link():
    rig = Rig()
    submit = rig.submit("a", range(30), 3)
    rig.lose = lambda message: isinstance(message, Now | Status | Delta)
    rig.assert_finishes(submit)
    rig.tell(MasterDown())
    rig.lose = lambda message: False
    rig.run(1.0)
    rig.tell(MasterUp(1))
    rig.tell(From("master", rig.master.poll()))
    rig.assert_quiet()
    assert rig.master.ends["a", 0].reason == "done"


def test_a_poll_or_link_of_an_earlier_term_is_ignored():
    rig = Rig()
    rig.tell(MasterUp(5))
    rig.tell(From("master", Poll(5, 0.02, 0.05, -1, -1)))
    count = len(rig.master.statuses)
    rig.tell(From("master", Poll(4, 0.0, 0.0, 10**6, 77)))
    rig.tell(MasterUp(4))
    assert len(rig.master.statuses) == count
    assert rig.worker.overview()["term"] == 5


@pytest.mark.parametrize("seed", range(20))
def test_grant_numbers_in_any_order_are_told_in_two_numbers(seed):
    draw = random.Random(seed)
    numbers = list(range(100))
    draw.shuffle(numbers)
    numbers.sort(key=lambda number: number + draw.uniform(0, 40))
    seen, arrived = SeenGrants(), set()
    for number in numbers:
        seen.add(number)
        arrived.add(number)
        upto, mask = seen.columns()
        assert -(1 << 63) <= mask < 1 << 63
        told = {upto + 1 + bit for bit in range(64) if mask >> bit & 1}
        assert told | set(range(upto + 1)) == arrived
    assert seen.columns() == (99, 0)


def test_a_number_that_never_comes_does_not_hold_up_the_others():
    seen = SeenGrants()
    for number in range(1, 64):
        seen.add(number)
    assert seen.columns() == (-1, -2), "all but the first, as a signed mask"
    seen.add(64)
    assert seen.columns() == (64, 0)
    seen.add(10**15)
    assert seen.upto == 10**15 - 64


def test_a_fence_counts_its_number_as_seen():
    rig = Rig()
    rig.tell(From("master", Fence("a", 0, 0, 0)))
    rig.tell(From("master", Fence("a", 0, 9, 3)))
    rig.run(0.1)
    assert rig.master.statuses[-1].columns()[0, COLUMN["granted_upto"]] == 0


# ---------------------------------------------------------------- cache


def work(rig: Rig, count: int, offset: int = 0) -> None:
    for number in range(offset, offset + count):
        rig.assert_finishes(rig.submit(f"w{number}", range(50 * number, 50 * number + 40), 4))


def truth(rig: Rig) -> list[set[bytes]]:
    return [set(rank.batcher.blocks.keys()) for rank in rig.worker._ranks]


def test_deltas_rebuild_the_exact_view_through_evictions():
    rig = Rig(sim_params={"num_blocks": 24})
    work(rig, 12)
    rig.assert_quiet()
    assert rig.master.snapshots == 1
    assert rig.master.deltas > 5


def test_x14_a_lost_delta_is_seen_and_mended_by_a_snapshot():
    rig = Rig()
    work(rig, 2)
    rig.run(1.0)
    lost = []
    rig.lose = lambda message: isinstance(message, Delta) and not lost and not lost.append(message)
    work(rig, 3, offset=2)
    rig.run(1.0)
    assert len(lost) == 1
    assert rig.master.snapshots == 2
    rig.assert_quiet()


@pytest.mark.parametrize("acked", [-1, 0, 10**9])
def test_a_master_without_a_view_or_with_an_impossible_one_gets_a_snapshot(acked):
    rig = Rig()
    work(rig, 2)
    rig.run(1.0)
    rig.master.version = acked
    rig.tell(From("master", rig.master.poll()))
    assert rig.master.snapshots == 2
    assert rig.master.keys == truth(rig)


def test_a_poll_that_crossed_the_snapshot_does_not_cause_another():
    rig = Rig(master=False)
    work(rig, 2)
    rig.tell(MasterUp(1))
    poll = rig.master.poll()
    rig.tell(From("master", poll))
    rig.tell(From("master", poll))
    assert rig.master.snapshots == 1
    rig.run(1.0)
    rig.assert_quiet()
    assert rig.master.snapshots == 1


def test_a_lost_snapshot_is_sent_again():
    rig = Rig(master=False)
    work(rig, 2)
    rig.lose = lambda message: isinstance(message, Snapshot)
    rig.tell(MasterUp(1))
    rig.tell(From("master", rig.master.poll()))
    rig.lose = lambda message: False
    rig.run(1.0)
    assert rig.master.keys == truth(rig)


def test_a_new_link_starts_with_a_snapshot_in_slices(monkeypatch):
    monkeypatch.setattr(cache_report, "SLICE_KEYS", 7)
    rig = Rig(ranks=2)
    work(rig, 4)
    rig.assert_finishes(rig.submit("other", range(40), 4, rank=1))
    rig.run(1.0)
    before = rig.master.snapshots
    rig.tell(MasterDown())
    rig.master.term, rig.master.version, rig.master.acked_seq = 2, -1, -1
    rig.tell(MasterUp(2))
    rig.tell(From("master", rig.master.poll()))
    keys = truth(rig)
    assert rig.master.snapshots - before == sum(-(-len(held) // 7) for held in keys) > 2
    assert rig.master.keys == keys
    rig.assert_quiet()


def test_an_overflow_of_changes_becomes_a_snapshot(monkeypatch):
    monkeypatch.setattr(cache_report, "MAX_DELTA_KEYS", 8)
    rig = Rig()
    rig.run(0.1)
    before = rig.master.snapshots
    work(rig, 1)
    rig.assert_quiet()
    assert rig.master.snapshots > before


def test_x03_a_cleared_cache_is_told_with_the_next_delta():
    rig = Rig()
    work(rig, 3)
    rig.run(1.0)
    assert rig.master.keys[0]
    rig.worker._ranks[0].batcher.blocks.clear()
    rig.run(0.3)
    assert rig.master.keys == [set()]
    assert rig.master.snapshots == 1


def test_x01_a_new_life_of_the_worker_begins_at_version_one_with_its_own_epoch():
    """What the Master held of the old life is replaced by a snapshot."""
    rig = Rig()
    work(rig, 3)
    rig.run(1.0)
    old = rig.master.version
    again = Rig(master=False)
    again.master.version = old
    again.tell(MasterUp(1))
    again.tell(From("master", again.master.poll()))
    assert again.master.snapshots == 1
    assert again.master.version == 1
    assert again.master.keys == [set()]

"""What a Master does without one of its mechanisms."""

from __future__ import annotations

import pytest

from rtp.core.errors import ConfigError
from tests.support.fleet import Fleet, hashes_of

PROFILE = (1e-3, 1e-4, 1e-10, 1e-3, 1e-4, 1e-8)


def long_goes_first(fleet: Fleet) -> bool:
    """Whether the long request, which came first, goes before the short one."""
    first = fleet.grant(fleet.ask(2000))
    waiting = [fleet.ask(tokens) for tokens in (20_000, 200)]
    assert fleet.grant(waiting[0]) is None
    fleet.wait(0.1)
    worker = fleet.workers[first.worker_id]
    worker.see(first)
    fleet.first_token(first, 2000, 0, 0.02)
    fleet.finish(first)
    fleet.report(worker)
    return fleet.grant(waiting[0]) is not None and fleet.grant(waiting[1]) is None


def test_without_the_order_the_oldest_goes_first():
    for without, expected in (((), False), (("order",), True)):
        fleet = Fleet(without=without)
        fleet.add(profile=PROFILE)
        assert long_goes_first(fleet) is expected


def test_without_arriving_blocks_a_rank_has_what_it_told_of_only():
    for without, matched in (((), 3200), (("arriving",), 0)):
        fleet = Fleet(without=without)
        fleet.add("w0")
        fleet.ask(range(3200))
        assert fleet.master.map.match(hashes_of(range(3200))).best == matched // 16


def test_without_progress_a_report_does_not_say_when_a_rank_is_free():
    for without, corrected in (((), True), (("progress",), False)):
        fleet = Fleet(without=without)
        worker = fleet.add(profile=PROFILE)
        grant = fleet.grant(fleet.ask(2000))
        row = fleet.master.fleet.row_of((worker.id, 0))
        before = fleet.master.ranks.busy_until[row]
        worker.see(grant)
        fleet.report(worker, prefill_tokens=500, running=1)
        assert bool(fleet.master.ranks.busy_until[row] < before) is corrected


def test_without_grouping_nobody_takes_others_along():
    for without, together in (((), True), (("grouping",), False)):
        fleet = Fleet(without=without)
        fleet.add(ranks=4, lockstep=True)
        for _ in range(4):
            fleet.ask(500, tick=False)
        fleet.tick()
        assert len(fleet.grants()) == 4 or not together
        assert (fleet.master.rounds.num_group_grants > 0) is together


def test_an_unknown_mechanism_is_told():
    with pytest.raises(ConfigError, match="no mechanism 'luck'"):
        Fleet(without=("luck",))

"""A new Master and asks that find it before the workers do."""

from __future__ import annotations

from rtp.core.events import FrontendDown
from rtp.core.master.early import MOST_A_TICK
from rtp.core.messages import Grant, Refuse
from tests.support.fleet import FRONTEND, Fleet

GRACE_S = 5.0


def new_master(**settings: object) -> Fleet:
    fleet = Fleet(grace_s=GRACE_S, **settings)
    fleet.tick()
    return fleet


def test_an_ask_waits_for_a_first_worker_and_keeps_its_deadline():
    fleet = new_master()
    request = fleet.ask(range(40), deadline_s=4.0)
    assert fleet.sent(Refuse) == []
    assert not fleet.master.idle()
    assert fleet.master.overview(fleet.now)["queue"]["early"] == 1
    fleet.now += 1.5
    fleet.add("w0")
    (grant,) = fleet.sent(Grant)
    assert grant.request_id == request
    fleet.master.check()


def test_a_deadline_that_passes_meanwhile_is_kept():
    fleet = new_master()
    fleet.ask(range(40), deadline_s=2.0)
    fleet.ask(range(40), deadline_s=9.0, ttft_timeout_s=3.0)
    assert fleet.master.next_deadline() == fleet.now + 2.0
    fleet.now += 2.0
    fleet.tick()
    assert [r.status for r in fleet.sent(Refuse)] == [504]
    assert fleet.master.next_deadline() == fleet.now + 1.0
    fleet.now += 1.0
    fleet.tick()
    assert [r.status for r in fleet.sent(Refuse)] == [504, 504]
    assert fleet.master.idle()
    assert fleet.master.next_deadline() is None


def test_what_still_has_no_worker_when_the_master_is_new_no_more_is_refused():
    fleet = new_master()
    fleet.add("w0")
    fleet.ask(range(40), model="another")
    assert fleet.sent(Refuse) == []
    fleet.now += GRACE_S
    fleet.tick()
    assert [r.status for r in fleet.sent(Refuse)] == [404]
    fleet.ask(range(40), model="another")
    assert [r.status for r in fleet.sent(Refuse)] == [404, 404]


def test_a_cancel_a_higher_attempt_and_a_lost_frontend_count():
    fleet = new_master()
    gone, replaced, lost = (fleet.ask(range(40)) for _ in range(3))
    fleet.cancel(gone)
    fleet.ask(range(40), request_id=replaced, attempt=2)
    fleet.ask(range(40), request_id=replaced, attempt=1)
    assert len(fleet.master.intake.early) == 2
    fleet.tell(FrontendDown(FRONTEND))
    assert len(fleet.master.intake.early) == 0
    fleet.ask(range(40), request_id=lost)
    fleet.add("w0")
    assert [g.request_id for g in fleet.sent(Grant)] == [lost]


def test_a_backlog_is_asked_anew_in_slices():
    fleet = new_master()
    for _ in range(2 * MOST_A_TICK + 1):
        fleet.ask(range(40))
    fleet.add("w0", join=False)
    for left in (MOST_A_TICK + 1, 1):
        assert len(fleet.master.intake.early) == left
        assert fleet.master.next_deadline() <= fleet.now
        fleet.tick()
    assert len(fleet.master.intake.early) == 0
    assert len(fleet.master.intake.waiting) == 2 * MOST_A_TICK + 1


def test_they_are_bounded_by_the_queue():
    fleet = new_master(max_queue_requests=2)
    for _ in range(3):
        fleet.ask(range(40))
    assert [r.status for r in fleet.sent(Refuse)] == [503]

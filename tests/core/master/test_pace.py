"""How often workers are asked to report follows how busy the Master's loop is (protocol rule 3)."""

from __future__ import annotations

from rtp.core.events import LoopBusy
from rtp.core.master.links import BUSY, CALM, LONGEST_PERIOD_S, STATUS_PERIOD_S
from rtp.core.messages import Poll
from tests.support.fleet import Fleet


def asked_period(fleet: Fleet) -> float:
    """What the next Poll to a worker says."""
    polls = fleet.sent(Poll, fleet.report(fleet.workers["w0"]))
    assert len(polls) == 1
    assert fleet.master.overview(fleet.now)["status_period_s"] == polls[0].status_period_s
    return polls[0].status_period_s


def test_the_period_stretches_only_while_the_loop_is_too_busy_and_no_further_than_it_may():
    fleet = Fleet()
    fleet.add()
    fleet.tell(LoopBusy(BUSY))
    assert asked_period(fleet) == STATUS_PERIOD_S
    seen = []
    for _ in range(8):
        fleet.tell(LoopBusy(0.95))
        seen.append(asked_period(fleet))
    assert seen == sorted(seen)
    assert seen[0] > STATUS_PERIOD_S
    assert seen[-1] == LONGEST_PERIOD_S
    fleet.tell(LoopBusy((BUSY + CALM) / 2))  # neither: it stays
    assert asked_period(fleet) == LONGEST_PERIOD_S
    for _ in range(8):
        fleet.tell(LoopBusy(0.2))
        seen.append(asked_period(fleet))
    assert seen[-1] == STATUS_PERIOD_S

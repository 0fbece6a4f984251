"""Membership: who is there, who is silent, who is gone, and what follows for the rest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from rtp.core.commands import Dial, HangUp, Send
from rtp.core.events import From, FrontendDown, FrontendUp, LinkDown, LinkUp
from rtp.core.master.members import FAIL_S, LOST_S, SUSPECT_S
from rtp.core.master.view import MASK_BITS
from rtp.core.messages import Fence, Poll, WorkerLost
from rtp.core.types import FrontendId, Role
from tests.support.fleet import BLOCK, FRONTEND, Fleet, Worker, hashes_of

PROMPT = range(512)


def dials(fleet: Fleet) -> list[Dial]:
    return [c for c in fleet.out if isinstance(c, Dial)]


def test_a_worker_registers_is_dialled_and_usable_after_its_first_status():
    fleet = Fleet()
    worker = fleet.add(join=False)
    assert dials(fleet) == [Dial(worker.id, 1, worker.register.address)]
    assert fleet.state("w0") == "dialling"
    polls = fleet.sent(Poll, fleet.link(worker))
    assert polls == [Poll(1, 0.020, 0.050, -1, -1)]
    waiting = fleet.ask()
    assert fleet.grant(waiting) is None
    assert fleet.refusal(waiting) is None
    answer = fleet.report(worker)
    assert fleet.sent(Poll, answer)[0].acked_seq == 0
    assert fleet.state("w0") == "live"
    assert fleet.grant(waiting) is not None


def test_r01_an_ipv6_address_is_kept_whole():
    fleet = Fleet()
    fleet.add(address="[fd00::1]:8000")
    assert dials(fleet)[0].address == "[fd00::1]:8000"
    assert fleet.grant(fleet.ask()).address == "[fd00::1]:8000"


def test_r02_a_second_registration_of_an_address_leaves_one_entry_with_the_new_role():
    fleet = Fleet()
    fleet.add("old", address="10.0.0.1:1", role=Role.PREFILL)
    fleet.add("new", address="10.0.0.1:1", role=Role.FUSION)
    overview = fleet.master.overview(fleet.now)
    assert list(overview["workers"]) == ["new"]
    assert overview["workers"]["new"]["role"] == "fusion"
    assert overview["models"]["m"]["workers"] == 1
    assert fleet.state("old") == "replaced"
    again = fleet.add("new", address="10.0.0.1:1", role=Role.ENCODE)
    overview = fleet.master.overview(fleet.now)
    assert overview["models"]["m"]["workers"] == 0
    assert overview["workers"]["new"]["role"] == "encode"
    assert again.id == "new"


def test_r03_re_registration_of_the_same_life_opens_no_gap():
    fleet = Fleet()
    worker = fleet.add()
    for _ in range(50):
        assert fleet.tell(From("w0", worker.register)) == []
        request = fleet.ask()
        grant = fleet.grant(request)
        assert grant is not None
        fleet.finish(grant)
    assert len(dials(fleet)) == 1
    assert not fleet.notes("request.refused")
    assert fleet.master.idle()


def test_r05_a_worker_that_is_never_reached_ends_as_failed_and_frees_its_address():
    fleet = Fleet()
    worker = fleet.add("ghost", join=False, address="10.9.9.9:1")
    fleet.tell(LinkDown(worker.id, 1, refused=True))
    fleet.wait(FAIL_S - 0.5, beat=False)
    assert fleet.state("ghost") == "dialling"
    assert len(dials(fleet)) > 1
    for _ in range(3):
        fleet.tell(LinkDown(worker.id, 1, refused=True))
    fleet.wait(1.0, beat=False)
    assert fleet.state("ghost") == "failed"
    assert fleet.notes("worker.failed")
    fleet.add("other", address="10.9.9.9:1")
    assert fleet.grant(fleet.ask()).worker_id == "other"


def test_redials_back_off_and_stay_bounded():
    fleet = Fleet()
    worker = fleet.add(join=False)
    times = []
    while fleet.state("w0") == "dialling":
        times.append(fleet.now)
        fleet.tell(LinkDown(worker.id, 1))
        before = len(dials(fleet))
        while len(dials(fleet)) == before and fleet.state("w0") == "dialling":
            fleet.now = fleet.master.next_deadline()
            fleet.tick()
    gaps = [b - a for a, b in pairwise(times)]
    assert 5 < len(times) < 25
    assert max(gaps) <= 1.0
    assert gaps[0] < 0.2


def test_w10_a_silent_worker_gets_no_new_grants():
    fleet = Fleet()
    stale, other = fleet.add("stale"), fleet.add("other")
    fleet.store(stale, hashes_of(PROMPT))
    fleet.now += SUSPECT_S + 0.1
    fleet.report(other)
    assert fleet.state("stale") == "suspect"
    assert fleet.notes("worker.suspected")
    assert fleet.grant(fleet.ask(range(513))).worker_id == "other"
    fleet.report(stale)
    assert fleet.state("stale") == "live"
    assert fleet.notes("worker.recovered")
    assert fleet.grant(fleet.ask(range(513))).worker_id == "stale"


def test_x07_a_dead_worker_is_not_chosen_for_its_prefix_and_is_lost_after_3_s():
    fleet = Fleet()
    fleet.tell(FrontendUp(FRONTEND))
    dead, _other = fleet.add("dead"), fleet.add("other")
    fleet.store(dead, hashes_of(PROMPT))
    running = fleet.ask(range(513))
    assert fleet.grant(running).worker_id == "dead"
    fleet.unlink(dead)
    assert fleet.state("dead") == "reconnecting"
    assert fleet.grant(fleet.ask(range(514))).worker_id == "other"
    del fleet.workers["dead"]
    fleet.wait(LOST_S + 0.1)
    assert fleet.state("dead") == "lost"
    assert fleet.sent(WorkerLost) == [WorkerLost(dead.id, 1)]
    assert HangUp(dead.id, 1) in fleet.out
    assert fleet.master.map.num_blocks == 0, "its keys are gone, swept without further events"
    assert fleet.grant(fleet.ask(range(515))).worker_id == "other"


def test_a_lost_worker_is_removed_though_its_age_is_rounded_down():
    """128 is near: then + 3 loses a bit, and (then + 3) - then is less than 3."""
    fleet = Fleet()
    worker = fleet.add()
    fleet.now = next(t for t in (127.1 + i / 10 for i in range(9)) if (t + LOST_S) - t < LOST_S)
    fleet.unlink(worker)
    fleet.wait(LOST_S, beat=False)
    assert fleet.state("w0") == "lost"
    num_dials = len(dials(fleet))
    fleet.wait(1.0, beat=False)
    assert len(dials(fleet)) == num_dials


def test_x08_one_dead_address_of_four_does_not_delay_the_others():
    fleet = Fleet()
    fleet.add("dead", join=False)
    for name in ("a", "b", "c"):
        fleet.add(name)
    served = {fleet.grant(fleet.ask()).worker_id for _ in range(9)}
    assert served == {"a", "b", "c"}


def test_x09_every_worker_comes_back_to_a_new_master():
    old = Fleet(term=1)
    workers = [old.add(f"w{i}") for i in range(8)]
    for _ in range(20):
        grant = old.grant(old.ask())
        old.workers[grant.worker_id].see(grant)
    new = Fleet(term=2)
    for worker in workers:
        new.workers[worker.id] = worker
        new.tell(From(worker.id, worker.register))
        new.link(worker)
        new.report(worker)
    for _ in range(16):
        grant = new.grant(new.ask())
        worker = new.workers[grant.worker_id]
        assert not worker.has_seen(0, grant.number), "a number of the Master before"
        worker.see(grant)
    assert {g.worker_id for g in new.grants()} == {w.id for w in workers}


def test_a_late_submit_of_an_earlier_masters_grant_is_not_taken_for_one_of_this():
    old, new = Fleet(), Fleet(term=2)
    worker = old.add()
    stale = old.grant(old.ask())
    new.workers[worker.id] = worker
    new.tell(From(worker.id, worker.register))
    new.link(worker)
    new.report(worker)
    grant = new.grant(new.ask())
    worker.see(stale)
    new.report(worker)
    row = new.master.fleet.row_of((worker.id, 0))
    assert new.master.ranks.charged_requests[row] == 1, "the grant counts as seen, and is not"
    new.wait(2.0)
    assert new.sent(Fence)[-1].number == grant.number
    assert new.master.idle()


def test_a_masters_numbers_are_behind_those_of_an_earlier_one_whose_clock_went_before():
    """Its term is the last one + 1, but the last one granted more than terms lie apart."""
    fleet = Fleet(term=2)
    worker = fleet.add(join=False)
    for number in range(5000):
        worker.seen[0].add(number)
    fleet.link(worker)
    fleet.report(worker)
    grant = fleet.grant(fleet.ask())
    assert grant.number > 4999 + MASK_BITS
    row = fleet.master.fleet.row_of((worker.id, 0))
    fleet.report(worker)
    assert fleet.master.ranks.charged_requests[row] == 1, "nobody has submitted it"


def test_a_late_submit_from_before_a_worker_was_lost_is_not_taken_for_a_new_grants():
    fleet = Fleet()
    worker = fleet.add()
    stale = fleet.grant(fleet.ask())
    fleet.wait(5.0, beat=False)
    assert fleet.sent(WorkerLost)
    fleet.tell(From(worker.id, worker.register))
    fleet.link(worker)
    fleet.report(worker)
    grant = fleet.grant(fleet.ask())
    assert grant.epoch == stale.epoch
    assert grant.number > stale.number


def test_a_fence_that_was_lost_with_the_link_is_sent_again():
    fleet = Fleet()
    worker = fleet.add()
    lost, running = fleet.grant(fleet.ask()), fleet.grant(fleet.ask())
    worker.see(running)
    fleet.report(worker)
    fleet.wait(1.0)
    assert [f.number for f in fleet.sent(Fence)] == [lost.number]
    fleet.out.clear()
    fleet.tell(LinkDown(worker.id, 1))
    fleet.wait(0.1, beat=False)
    fleet.link(worker)
    assert [f.number for f in fleet.sent(Fence, fleet.report(worker))] == [lost.number]


def test_x01_a_restart_in_place_drops_every_key_of_the_old_life():
    fleet = Fleet()
    fleet.tell(FrontendUp(FRONTEND))
    worker = fleet.add()
    for start in range(0, 5000, 10):
        fleet.store(worker, hashes_of(range(start, start + 32)))
    fleet.store(worker, hashes_of(PROMPT))
    running = fleet.grant(fleet.ask(range(513)))
    assert running.matched_tokens == 512
    address = worker.register.address
    fresh = fleet.add("w0", epoch=2, address=address)
    assert fleet.sent(WorkerLost) == [WorkerLost(worker.id, 1)]
    assert HangUp(worker.id, 1) in fleet.out
    fleet.snapshot(fresh)
    grant = fleet.grant(fleet.ask(range(513)))
    assert (grant.epoch, grant.matched_tokens) == (2, 0)
    fleet.finish(grant, "cancelled")
    fleet.wait(1.0)
    assert fleet.master.map.num_blocks == 0
    assert fleet.master.idle()


def test_x12_late_messages_of_a_removed_life_are_ignored_and_counted():
    fleet = Fleet()
    old = fleet.add()
    fleet.snapshot(old)
    late = Worker(old.register)
    late.seq, late.version = old.seq, old.version
    fleet.add("w0", epoch=2, address=old.register.address)
    fleet.store(late, hashes_of(PROMPT))
    fleet.tell(From("w0", late.status(1)))
    assert fleet.tell(LinkUp(old.id, 1)) == [HangUp(old.id, 1)]
    fleet.tell(LinkDown(old.id, 1))
    fleet.tell(From("w0", old.register))
    assert fleet.master.map.num_blocks == 0
    assert fleet.state("w0") == "live"
    assert fleet.master.overview(fleet.now)["stale_messages"] >= 3


def test_the_same_epoch_back_within_3_s_goes_on():
    fleet = Fleet()
    worker = fleet.add()
    fleet.store(worker, hashes_of(PROMPT))
    running = fleet.grant(fleet.ask(range(513)))
    fleet.unlink(worker)
    waiting = fleet.ask(range(514))
    fleet.wait(1.0, beat=False)
    assert fleet.grant(waiting) is None
    assert fleet.refusal(waiting) is None
    poll = fleet.sent(Poll, fleet.link(worker))[-1]
    assert poll.acked_version == worker.version
    worker.see(running)
    fleet.report(worker)
    grant = fleet.grant(waiting)
    assert (grant.number, grant.matched_tokens) == (running.number + 1, 512)
    fleet.finish(running)
    fleet.finish(grant)
    assert fleet.master.idle()
    assert not fleet.sent(WorkerLost)


def test_a_fence_for_a_closed_link_is_sent_when_it_is_back():
    fleet = Fleet()
    worker = fleet.add()
    grant = fleet.grant(fleet.ask())
    fleet.unlink(worker)
    fleet.cancel(grant.request_id)
    assert not fleet.sent(Fence)
    assert fleet.sent(Fence, fleet.link(worker)) == [Fence(grant.request_id, 1, 0, grant.number)]


def test_a_worker_that_links_and_drops_and_never_reports_is_lost():
    fleet = Fleet()
    worker = fleet.add(join=False)
    for _ in range(20):
        fleet.link(worker)
        fleet.wait(0.25, beat=False)
        fleet.unlink(worker)
        fleet.wait(0.25, beat=False)
    assert fleet.state("w0") == "lost"
    assert fleet.notes("worker.lost")[-1].fields["reason"] == "no status"


def test_a_worker_that_sends_all_but_reports_is_lost():
    fleet = Fleet()
    worker = fleet.add()
    for _ in range(45):
        fleet.snapshot(worker)
        fleet.wait(0.25, beat=False)
    assert fleet.state("w0") == "lost"


@pytest.mark.parametrize("closed", [True, False])
def test_a_worker_may_promise_that_its_cache_is_prefix_closed(closed: bool):
    """Where all owners promise, a match jumps over what lies between two blocks they hold."""
    fleet = Fleet()
    worker = fleet.add(prefix_closed=closed)
    prompt = hashes_of(range(64 * BLOCK))
    fleet.store(worker, prompt[: 16 * 60] + prompt[16 * 61 :])
    found = fleet.master.map.match(prompt)
    row = fleet.master.fleet.row_of((worker.id, 0))
    assert found.device[row] == (64 if closed else 60)
    fleet.tell(From("w0", replace(worker.register, epoch=2, prefix_closed=False)))
    again = fleet.workers["w0"] = Worker(replace(worker.register, epoch=2, prefix_closed=False))
    fleet.link(again)
    fleet.report(again)
    fleet.store(again, prompt[: 16 * 60] + prompt[16 * 61 :])
    row = fleet.master.fleet.row_of((worker.id, 0))
    assert fleet.master.map.match(prompt).device[row] == 60


@pytest.mark.parametrize("seconds", [2.0, 5.0, 30.0])
def test_a_master_that_stood_still_takes_nobody_for_silent(seconds: float):
    """SIGSTOP: what the workers sent is read after the first Tick."""
    fleet = Fleet()
    workers = [fleet.add(f"w{i}") for i in range(3)]
    granted = fleet.grant(fleet.ask())
    fleet.now += seconds
    fleet.tick()
    assert all(fleet.state(worker.id) == "live" for worker in workers)
    assert not fleet.sent(Fence)
    workers[0].see(granted)
    for worker in workers:
        fleet.report(worker)
    fleet.wait(1.0)
    assert all(fleet.state(worker.id) == "live" for worker in workers)
    fleet.wait(LOST_S + 1.0, beat=False)
    assert {fleet.state(worker.id) for worker in workers} == {"lost"}


def test_a_draining_worker_gets_no_new_grants_and_finishes_what_runs():
    fleet = Fleet()
    leaving, other = fleet.add("leaving"), fleet.add("other")
    grants = [fleet.grant(fleet.ask()) for _ in range(4)]
    leaving.draining = True
    fleet.report(leaving)
    assert {fleet.grant(fleet.ask()).worker_id for _ in range(4)} == {other.id}
    for grant in fleet.grants():
        fleet.finish(grant)
    assert fleet.master.idle()
    assert len(grants) == 4


def test_o01_a_hung_worker_gets_no_new_grants_until_it_says_otherwise():
    fleet = Fleet()
    fleet.tell(FrontendUp(FRONTEND))
    hung, other = fleet.add("hung"), fleet.add("other")
    fleet.store(hung, hashes_of(PROMPT))
    running = fleet.grant(fleet.ask(range(513)))
    assert running.worker_id == "hung"
    hung.see(running)
    hung.hung = True
    for _ in range(3):
        fleet.report(hung)
    assert fleet.state("hung") == "hung"
    assert len(fleet.notes("worker.hung")) == 1
    states = fleet.master.overview(fleet.now)["worker_states"]
    assert (states["hung"], states["live"]) == (1, 1)
    assert fleet.grant(fleet.ask(range(514))).worker_id == other.id
    fleet.now += SUSPECT_S + 0.1  # silent as well, and heard of again
    fleet.report(other)
    assert fleet.state("hung") == "suspect"
    fleet.report(hung)
    assert fleet.state("hung") == "hung"
    assert fleet.grant(fleet.ask(range(515))).worker_id == other.id
    hung.hung = False
    fleet.report(hung)
    assert fleet.state("hung") == "live"
    assert fleet.notes("worker.recovered")
    assert fleet.grant(fleet.ask(range(516))).worker_id == "hung"
    assert not fleet.sent(WorkerLost), "what runs there goes on"
    assert not fleet.sent(Fence)


def test_o01_requests_wait_for_the_only_worker_that_hangs():
    fleet = Fleet()
    worker = fleet.add()
    worker.hung = True
    fleet.report(worker)
    request = fleet.ask()
    assert fleet.grant(request) is None
    assert fleet.refusal(request) is None
    fleet.unlink(worker)
    fleet.link(worker)
    fleet.report(worker)
    assert fleet.state("w0") == "hung", "said again to whoever links anew"
    assert fleet.grant(request) is None
    worker.hung = False
    fleet.report(worker)
    assert fleet.grant(request).worker_id == worker.id


def test_only_draining_workers_left_is_refused_at_once():
    fleet = Fleet()
    worker = fleet.add()
    worker.draining = True
    fleet.report(worker)
    assert fleet.refusal(fleet.ask()).code == "service_unavailable"


def test_a_worker_whose_cache_format_differs_from_its_model_s_is_refused_and_shown():
    fleet = Fleet()
    fleet.add("a")
    for name, field in (("b", {"kv_format": "int8"}), ("c", {"block_size": 64})):
        fleet.add(name, join=False, **field)
        assert fleet.state(name) == "refused"
        assert next(iter(field)) in fleet.notes("worker.refused")[-1].fields["reason"]
    fleet.tell(From("b", fleet.workers["b"].register))
    assert len(fleet.notes("worker.refused")) == 2, "told once, though it asks again"
    assert list(fleet.master.overview(fleet.now)["workers"]) == ["a"]


def test_b03_gauges_of_removed_workers_go():
    fleet = Fleet()
    worker = fleet.add()
    fleet.tell(From("w0", worker.register))
    assert fleet.master.overview(fleet.now)["worker_states"]["live"] == 1
    fleet.unlink(worker)
    del fleet.workers["w0"]
    fleet.wait(LOST_S + 0.1)
    overview = fleet.master.overview(fleet.now)
    assert overview["workers"] == {}
    assert sum(overview["worker_states"].values()) == 0
    assert overview["models"]["m"]["usable_ranks"] == 0


def test_rows_are_reused_and_the_table_is_bounded():
    fleet = Fleet(max_ranks=4)
    for life in range(1, 40):
        fleet.add("w0", epoch=life, ranks=3, address="10.0.0.1:1")
    fleet.add("w1", ranks=2, join=False)
    assert fleet.state("w1") == "refused"
    assert fleet.grant(fleet.ask()).epoch == 39


def test_a_frontend_that_left_is_not_told_of_losses():
    fleet = Fleet()
    fleet.tell(FrontendUp(FrontendId("a")))
    fleet.tell(FrontendUp(FrontendId("b")))
    fleet.tell(FrontendDown(FrontendId("a")))
    worker = fleet.add()
    out = fleet.tell(From("w0", replace(worker.register, epoch=2)))
    peers = [c.peer for c in out if isinstance(c, Send) and isinstance(c.message, WorkerLost)]
    assert peers == ["b"]

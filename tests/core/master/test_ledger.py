"""Every grant is settled exactly once, however its request ends; then nothing is charged."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from rtp.core.errors import IllegalMove
from rtp.core.events import From, FrontendDown, FrontendUp
from rtp.core.master.ledger import LINGER_S
from rtp.core.master.master import LEASE_MARGIN_S, LEASE_S
from rtp.core.messages import Fence, Finished, Grant, Now, WorkerLost
from tests.support.fleet import FRONTEND, Fleet, hashes_of

EXPIRY_S = LEASE_S + LEASE_MARGIN_S


def seen(fleet: Fleet, grant: Grant) -> None:
    fleet.workers[grant.worker_id].see(grant)
    fleet.report(fleet.workers[grant.worker_id])


def ends_by_finish(fleet: Fleet, grant: Grant) -> None:
    seen(fleet, grant)
    fleet.finish(grant)


def ends_by_now_before_any_status(fleet: Fleet, grant: Grant) -> None:
    end = Finished(grant.request_id, grant.attempt, "done", 100, 0, 5)
    fleet.tell(From(grant.worker_id, Now(grant.worker_id, grant.epoch, (), (end,))))
    seen(fleet, grant)


def ends_by_rejection(fleet: Fleet, grant: Grant) -> None:
    fleet.finish(grant, "rejected")


def ends_by_cancel_unseen(fleet: Fleet, grant: Grant) -> None:
    out = fleet.cancel(grant.request_id)
    assert fleet.sent(Fence, out) == [
        Fence(grant.request_id, grant.attempt, grant.rank, grant.number)
    ]


def ends_by_cancel_running(fleet: Fleet, grant: Grant) -> None:
    seen(fleet, grant)
    fleet.cancel(grant.request_id)
    fleet.finish(grant, "cancelled")


def ends_by_lease(fleet: Fleet, grant: Grant) -> None:
    out = fleet.wait(EXPIRY_S + 0.01)
    assert fleet.sent(Fence, out) == [Fence(grant.request_id, 1, 0, grant.number)]


def ends_by_a_new_attempt(fleet: Fleet, grant: Grant) -> None:
    fleet.ask(request_id=grant.request_id, attempt=2, exclude=(grant.worker_id,), failed=True)
    fleet.finish(fleet.grant(grant.request_id))
    assert fleet.grant(grant.request_id).attempt == 2


def ends_by_loss(fleet: Fleet, grant: Grant) -> None:
    del fleet.workers[grant.worker_id]
    fleet.wait(4.0)


def ends_by_restart(fleet: Fleet, grant: Grant) -> None:
    worker = fleet.workers[grant.worker_id]
    fleet.tell(From(worker.id, replace(worker.register, epoch=2)))


def ends_by_frontend_loss(fleet: Fleet, grant: Grant) -> None:
    fleet.tell(FrontendDown(FRONTEND))
    fleet.wait(EXPIRY_S + 0.01)


ENDS = [value for name, value in list(globals().items()) if name.startswith("ends_by")]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_the_ledger_is_zero_after_every_way_to_end(end: Callable[[Fleet, Grant], None]):
    fleet = Fleet()
    fleet.tell(FrontendUp(FRONTEND))
    fleet.add("w0", ranks=2)
    fleet.add("w1")
    grant = fleet.grant(fleet.ask(500))
    assert not fleet.master.idle()
    end(fleet, grant)
    assert fleet.master.idle()
    fleet.wait(LINGER_S + 4.0)
    assert fleet.master.idle()
    assert fleet.master.map.num_blocks == 0, "arriving blocks were taken back"


def test_load_is_reported_plus_unseen_grants():
    fleet = Fleet()
    worker = fleet.add(profile=(1e-4, 1e-6, 1e-12, 1e-3, 1e-4, 1e-8))
    grants = [fleet.grant(fleet.ask(100)) for _ in range(3)]
    ranks = fleet.master.ranks
    row = fleet.master.fleet.row_of((worker.id, 0))
    assert (ranks.charged_tokens[row], ranks.charged_requests[row]) == (300, 3)
    worker.see(grants[1])
    fleet.report(worker, prefill_tokens=100, waiting=1)
    assert (ranks.charged_tokens[row], ranks.charged_requests[row]) == (200, 2)
    worker.see(grants[0])
    worker.see(grants[2])
    fleet.report(worker, prefill_tokens=300, waiting=3)
    assert (ranks.charged_tokens[row], ranks.reserved_tokens[row]) == (0, 3 * 16)
    for grant in grants:
        fleet.finish(grant)
    assert fleet.master.idle()


def test_work_behind_a_long_cached_context_is_not_taken_for_quick():
    """A Status tells the tokens left, not what lies before them: the grant knows that."""
    per_pair = 1e-8
    fleet = Fleet()
    worker = fleet.add(profile=(1e-3, 1e-5, per_pair, 1e-3, 1e-4, 1e-8))
    fleet.store(worker, hashes_of(range(4000)))
    grant = fleet.grant(fleet.ask(range(4800)))
    assert grant.matched_tokens == 4000
    ranks, row = fleet.master.ranks, fleet.master.fleet.row_of((worker.id, 0))
    predicted_s = 1e-3 + 800 * (1e-5 + per_pair * (4000 + 400))
    assert ranks.busy_until[row] - fleet.now == pytest.approx(predicted_s)
    worker.see(grant)
    fleet.report(worker, prefill_tokens=800, running=1)
    assert ranks.busy_until[row] - fleet.now == pytest.approx(predicted_s)
    fleet.report(worker, prefill_tokens=400, running=1)
    assert ranks.busy_until[row] - fleet.now == pytest.approx(predicted_s / 2)
    fleet.first_token(grant, 800, 4000, predicted_s)
    fleet.finish(grant)
    assert fleet.master.idle()


def test_a_grant_number_63_ahead_is_found_in_the_mask():
    fleet = Fleet()
    worker = fleet.add(profile=(1e-7, 1e-9, 1e-15, 1e-3, 1e-4, 1e-8))
    grants = [fleet.grant(fleet.ask(2)) for _ in range(64)]
    assert None not in grants
    blocked = fleet.ask(2)
    assert fleet.grant(blocked) is None, "a 65th number would not fit the mask"
    worker.see(grants[63])
    fleet.report(worker)
    row = fleet.master.fleet.row_of((worker.id, 0))
    assert fleet.master.ranks.charged_requests[row] == 63
    worker.see(grants[0])
    fleet.report(worker)
    assert fleet.grant(blocked).number == grants[63].number + 1


def test_a_lease_is_not_judged_while_its_worker_is_silent():
    fleet = Fleet()
    worker = fleet.add()
    grant = fleet.grant(fleet.ask())
    fleet.wait(1.0, beat=False)
    assert fleet.state("w0") == "suspect"
    worker.see(grant)
    fleet.report(worker)
    assert not fleet.sent(Fence)
    fleet.finish(grant)
    assert fleet.master.idle()


def test_r08_a_retry_goes_elsewhere_and_its_old_booking_goes_first():
    fleet = Fleet()
    failing, other = fleet.add("failing"), fleet.add("other")
    fleet.store(failing, hashes_of(range(512)))
    first = fleet.grant(fleet.ask(range(513)))
    assert first.worker_id == failing.id
    start = len(fleet.out)
    fleet.ask(
        range(513), request_id=first.request_id, attempt=2, exclude=(failing.id,), failed=True
    )
    second = fleet.grant(first.request_id)
    assert (second.worker_id, second.attempt) == (other.id, 2)
    sent = [getattr(c, "message", None) for c in fleet.out[start:]]
    assert sent.index(Fence(first.request_id, 1, 0, first.number)) < sent.index(second)
    row = fleet.master.fleet.row_of((failing.id, 0))
    assert fleet.master.ranks.charged_requests[row] == 0


def test_an_excluded_worker_is_used_from_its_next_status_when_nothing_else_is_left():
    fleet = Fleet()
    only = fleet.add()
    request = fleet.ask(exclude=(only.id,))
    assert fleet.grant(request) is None
    fleet.now += 0.02
    fleet.report(only)
    assert fleet.grant(request).worker_id == only.id


def test_an_excluded_worker_is_not_used_because_the_others_are_busy():
    fleet = Fleet()
    failing, other = fleet.add("failing"), fleet.add("other")
    fleet.report(other, prefill_tokens=50_000)
    request = fleet.ask(exclude=(failing.id,))
    assert fleet.grant(request) is None
    fleet.report(other, prefill_tokens=0)
    assert fleet.grant(request).worker_id == other.id


def test_an_exclusion_ends_when_the_others_stay_busy():
    fleet = Fleet()
    failing, other = fleet.add("failing"), fleet.add("other")
    fleet.report(other, prefill_tokens=900_000)
    request = fleet.ask(exclude=(failing.id,))
    fleet.wait(0.9)
    assert fleet.grant(request) is None
    fleet.wait(0.5)
    assert fleet.grant(request).worker_id == failing.id


def test_nothing_is_reserved_for_a_request_while_its_reader_is_slow():
    fleet = Fleet()
    worker = fleet.add(kv_total=(400,), max_model_len=400)
    slow = fleet.grant(fleet.ask(100, max_tokens=200))
    worker.see(slow)
    fleet.report(worker, running=1, kv_free=300)
    other = fleet.ask(100, max_tokens=200)
    assert fleet.grant(other) is None
    worker.parked = (slow.request_id,)
    fleet.report(worker, running=0, waiting=1, kv_free=400)
    assert fleet.grant(other) is not None
    fleet.finish(fleet.grant(other), generated=128)
    worker.parked = ()
    fleet.report(worker, running=1, kv_free=300)
    third = fleet.ask(100, max_tokens=200)
    assert fleet.grant(third) is None
    worker.parked = (slow.request_id,)
    fleet.report(worker)
    fleet.finish(slow)  # as it is parked
    fleet.report(worker, running=0, waiting=0, kv_free=400)
    fleet.finish(fleet.grant(third))
    assert fleet.master.idle()


def test_w07_a_rank_that_has_just_refused_gets_nothing_until_its_next_status():
    fleet = Fleet()
    worker = fleet.add("w0")
    first = fleet.grant(fleet.ask())
    worker.see(first)
    end = Finished(first.request_id, 1, "rejected", 100, 0, 0)
    fleet.tell(From(worker.id, Now(worker.id, worker.epoch, (), (end,))))
    assert fleet.master.idle()
    second = fleet.ask()
    assert fleet.grant(second) is None
    fleet.report(worker)
    assert fleet.grant(second) is not None


def test_w07_a_worker_that_refused_once_is_eligible_again():
    fleet = Fleet()
    fleet.add("w0")
    first = fleet.grant(fleet.ask())
    fleet.finish(first, "rejected")
    assert fleet.master.idle()
    assert fleet.grant(fleet.ask()) is not None
    assert fleet.master.overview(fleet.now)["workers"]["w0"]["failures"] == 1


def test_repeats_change_nothing():
    fleet = Fleet()
    worker = fleet.add()
    request = fleet.ask(100)
    grant = fleet.grant(request)
    fleet.ask(100, request_id=request)
    assert fleet.grants() == [grant, grant], "an unseen grant is told again"
    end = Finished(request, 1, "done", 100, 0, 7)
    for _ in range(3):
        fleet.report(worker, finished=(end,))
    assert fleet.master.overview(fleet.now)["requests"]["finished"]["done"] == 1
    fleet.ask(100, request_id=request, attempt=1, tick=False)
    waiting = fleet.ask(100, request_id=request, attempt=3, tick=False)
    fleet.ask(100, request_id=request, attempt=2, tick=False)
    fleet.tick()
    assert fleet.grant(waiting).attempt == 3
    fleet.cancel(request, attempt=2)
    assert not fleet.master.idle(), "a late cancel of an earlier attempt"
    fleet.cancel(request, attempt=3)
    assert fleet.master.idle()


def test_a_first_token_that_is_told_twice_counts_once():
    fleet = Fleet()
    fleet.add()
    grant = fleet.grant(fleet.ask(100))
    for _ in range(3):
        fleet.first_token(grant, 100, 0, 0.002)
    overview = fleet.master.overview(fleet.now)
    assert overview["cache"]["prompt_tokens"] == 100
    assert overview["workers"]["w0"]["predictor"]["prefill_samples"] == 1


def test_a_status_that_comes_late_does_not_replace_a_newer_one():
    fleet = Fleet()
    worker = fleet.add()
    late = worker.status(fleet.term)
    fleet.report(worker, prefill_tokens=7000)
    fleet.tell(From(worker.id, late))
    rank = fleet.master.overview(fleet.now)["workers"]["w0"]["ranks"][0]
    assert rank["prefill_tokens"] == 7000
    assert fleet.master.overview(fleet.now)["stale_messages"] == 1


@pytest.mark.parametrize("table", [b"", b"x" * 7, b"x" * 960])
def test_a_status_whose_table_does_not_fit_the_worker_is_ignored(table: bytes):
    fleet = Fleet()
    worker = fleet.add()
    fleet.tell(From(worker.id, replace(worker.status(fleet.term), table=table)))
    assert fleet.master.overview(fleet.now)["stale_messages"] == 1
    assert fleet.grant(fleet.ask()) is not None


def test_a_booking_cannot_be_released_twice():
    fleet = Fleet()
    fleet.add()
    grant = fleet.grant(fleet.ask())
    booking = fleet.master.ledger.find(grant.request_id)
    fleet.master.ranks.release(booking)
    with pytest.raises(IllegalMove):
        fleet.master.ranks.release(booking)


def test_queued_asks_of_a_lost_frontend_are_dropped():
    fleet = Fleet()
    fleet.tell(FrontendUp(FRONTEND))
    worker = fleet.add()
    fleet.report(worker, prefill_tokens=50_000)
    requests = [fleet.ask() for _ in range(3)]
    fleet.tell(FrontendDown(FRONTEND))
    assert fleet.master.idle()
    fleet.report(worker, prefill_tokens=0)
    assert [fleet.grant(r) for r in requests] == [None] * 3


@pytest.mark.parametrize("seed", range(8))
def test_random_lives_leave_the_ledger_zero(seed: int):
    """Asks, reports, cancels, restarts, losses in any order; check() runs after every event."""
    rng = random.Random(seed)
    fleet = Fleet(max_ranks=16)
    fleet.tell(FrontendUp(FRONTEND))
    epochs = {f"w{i}": 1 for i in range(3)}
    for name in epochs:
        fleet.add(name, ranks=2, address=f"10.0.0.1:{name[1]}")
    for _ in range(250):
        fleet.now += rng.choice([0.0, 0.001, 0.02, 0.2])
        name = rng.choice(sorted(epochs))
        worker = fleet.workers[name]
        grants = [g for g in fleet.grants()[-20:] if g.worker_id in epochs]
        kind = rng.randrange(12)
        if kind < 4:
            fleet.ask(rng.randrange(1, 3000), n=rng.choice([1, 3]), priority=rng.randrange(-20, 20))
        elif kind < 6 and grants:
            grant = rng.choice(grants)
            if grant.epoch == epochs[grant.worker_id]:
                fleet.finish(grant, rng.choice(["done", "failed", "rejected", "cancelled"]))
        elif kind == 6 and grants:
            grant = rng.choice(grants)
            fleet.ask(50, request_id=grant.request_id, attempt=grant.attempt + 1, failed=True)
        elif kind == 7 and grants:
            fleet.cancel(rng.choice(grants).request_id, attempt=9)
        elif kind == 8:
            fleet.unlink(worker)
            if rng.random() < 0.7:
                fleet.link(worker)
                fleet.report(worker)
        elif kind == 9 and rng.random() < 0.3:
            epochs[name] += 1
            fleet.add(name, epoch=epochs[name], ranks=2, address=worker.register.address)
        else:
            fleet.report(worker, prefill_tokens=rng.choice([0, 0, 500, 9000]))
    fleet.workers.clear()
    fleet.wait(700.0, beat=False)
    assert fleet.master.idle()
    assert fleet.master.overview(fleet.now)["workers"] == {}
    assert fleet.master.map.num_blocks == 0
    lives = [(lost.worker_id, lost.epoch) for lost in fleet.sent(WorkerLost)]
    assert len(set(lives)) == len(lives)

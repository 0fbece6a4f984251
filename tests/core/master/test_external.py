"""Router-only grants: charged at once, settled by their caller's word, its lease or its worker's
end; never by a Status, and never in the way of one."""

from __future__ import annotations

import random

import pytest

from rtp.core.events import From
from rtp.core.master.due_times import TICK_S, DueTimes
from rtp.core.master.master import NUMBERS_A_TERM
from rtp.core.master.view import MASK_BITS
from rtp.core.messages import Done, Fence, Grant, Renew
from rtp.core.types import RequestId
from tests.support.fleet import FRONTEND, Fleet, hashes_of

LEASE_S = 60.0
AFTER_S = 0.11
"""Longer than what leases are rounded up by."""


def a_fleet(**worker: object) -> Fleet:
    fleet = Fleet()
    fleet.add("w0", **worker)
    return fleet


def place(fleet: Fleet, tokens: range | int = 100, **fields: object) -> Grant:
    grant = fleet.grant(fleet.ask(tokens, **{"lease_s": LEASE_S} | fields))
    assert grant is not None
    return grant


def done(fleet: Fleet, grant: Grant, reason: str = "done", generated: int = 10) -> None:
    message = Done(grant.request_id, grant.attempt, reason, 100, 32, generated)
    fleet.tell(From(FRONTEND, message))


def renew(fleet: Fleet, grant: Grant, lease_s: float, prefilled: bool = False) -> None:
    fleet.tell(From(FRONTEND, Renew(grant.request_id, grant.attempt, lease_s, prefilled)))


def charged(fleet: Fleet) -> tuple[float, float, float]:
    """Prefill tokens, requests, reserved tokens of rank 0."""
    ranks = fleet.master.ranks
    return ranks.charged_tokens[0], ranks.charged_requests[0], ranks.reserved_tokens[0]


def test_a_grant_is_charged_until_its_caller_is_done():
    fleet = a_fleet()
    grant = place(fleet)
    assert grant.lease_s == LEASE_S
    assert charged(fleet) == (100, 1, 16)
    done(fleet, grant)
    assert charged(fleet) == (0, 0, 0)
    done(fleet, grant)
    fleet.wait(1.0)
    assert fleet.master.idle()
    assert fleet.master.totals.finished["done"] == 1
    assert (fleet.master.totals.prompt_tokens, fleet.master.totals.hit_tokens) == (100, 32)


@pytest.mark.parametrize("reason", ["failed", "cancelled"])
def test_a_failed_or_withdrawn_grant_leaves_no_blocks_and_no_fence(reason: str):
    fleet = a_fleet()
    grant = place(fleet, range(160))
    if reason == "failed":
        done(fleet, grant, "failed")
    else:
        fleet.cancel(grant.request_id)
    assert fleet.master.idle()
    assert fleet.master.map.num_blocks == 0
    assert not fleet.sent(Fence)


def test_a_prompt_is_work_until_its_predicted_end_and_context_after_it():
    fleet = a_fleet()
    grant = place(fleet, 1000)
    assert charged(fleet) == (1000, 1, 16)
    fleet.wait(AFTER_S + 0.02)
    assert charged(fleet) == (0, 1, 1016)
    fleet.cancel(grant.request_id)
    assert charged(fleet) == (0, 0, 0)


def test_a_caller_may_tell_of_the_prefills_end_earlier():
    fleet = a_fleet()
    grant = place(fleet, 30_000)
    renew(fleet, grant, LEASE_S, prefilled=True)
    assert charged(fleet) == (0, 1, 30_016)
    renew(fleet, grant, LEASE_S, prefilled=True)
    assert charged(fleet) == (0, 1, 30_016)


def test_a_lease_ends_by_itself_and_is_counted():
    fleet = a_fleet()
    grant = place(fleet)
    fleet.wait(LEASE_S - 0.01)
    assert len(fleet.master.ledger) == 1
    fleet.wait(AFTER_S)
    assert fleet.master.idle()
    assert [note.fields["request_id"] for note in fleet.notes("schedule.lapsed")] == [
        grant.request_id
    ]
    assert fleet.master.totals.external_lapsed == 1
    assert not fleet.sent(Fence)


def test_a_renewed_lease_counts_from_its_renewal():
    fleet = a_fleet()
    grant = place(fleet, 30_000, lease_s=0.5)
    for _ in range(5):
        fleet.wait(0.4)
        renew(fleet, grant, 0.5)
    assert len(fleet.master.ledger) == 1
    fleet.wait(0.5 + AFTER_S)
    assert fleet.master.idle()


def test_more_grants_than_a_status_can_count_stand_in_nobodys_way():
    """Their numbers are none of the rank's: a worker's own count goes on without them."""
    fleet = a_fleet(max_rows=0)
    for _ in range(MASK_BITS + 10):
        grant = place(fleet, 1)
        fleet.tell(From(FRONTEND, Renew(grant.request_id, 1, LEASE_S, True)))
    normal = fleet.grant(fleet.ask(1))
    assert normal.number == NUMBERS_A_TERM
    fleet.workers["w0"].see(normal)
    fleet.report(fleet.workers["w0"])
    assert fleet.master.ranks.charged_requests[0] == MASK_BITS + 10
    assert fleet.grant(fleet.ask(1)).number == normal.number + 1


def test_a_lost_worker_takes_its_grants_with_it():
    fleet = a_fleet()
    grant = place(fleet)
    del fleet.workers["w0"]
    fleet.wait(4.0)
    assert fleet.master.booked(grant.request_id) is None
    assert fleet.master.idle()
    done(fleet, grant)


def test_a_second_attempt_releases_the_first_and_keeps_its_age():
    fleet = a_fleet()
    fleet.add("w1")
    first = place(fleet)
    arrival = fleet.master.booked(first.request_id).arrival
    fleet.wait(1.0)
    second = place(
        fleet, request_id=first.request_id, attempt=2, exclude=(first.worker_id,), failed=True
    )
    assert second.worker_id != first.worker_id
    assert fleet.master.booked(first.request_id).arrival == arrival
    assert len(fleet.master.ledger) == 1
    done(fleet, first)
    assert len(fleet.master.ledger) == 1
    done(fleet, second)
    assert fleet.master.idle()


def test_who_does_not_wait_gets_the_best_rank_even_if_it_is_busy():
    fleet = a_fleet()
    fleet.add("w1")
    fleet.store(fleet.workers["w0"], hashes_of(range(3200)))
    busy = place(fleet, range(30_000), at_once=True)
    assert busy.worker_id == "w0"
    tokens = [*range(3200), 7]
    assert place(fleet, tokens, at_once=True).worker_id == "w1"  # 0.2 s of prefill, not 10
    fleet.wait(0.2)
    waits = fleet.ask(100, lease_s=LEASE_S, exclude=("w1",))
    assert fleet.grant(waits) is None
    assert place(fleet, 100, at_once=True, exclude=("w1",)).worker_id == "w0"


def test_who_does_not_wait_is_refused_where_there_is_no_room():
    fleet = a_fleet(kv_total=(1000,))
    place(fleet, 900, at_once=True)
    refusal = fleet.refusal(fleet.ask(900, lease_s=LEASE_S, at_once=True))
    assert (refusal.status, refusal.code, refusal.retry_after_s) == (503, "overloaded", 1.0)
    assert fleet.master.admission.counts["no_room"] == 1
    assert not fleet.master.intake.waiting


def test_who_does_not_wait_stands_in_no_queue():
    """It takes no place of those that wait, pushes none of them out, and can be called off."""
    fleet = Fleet(max_queue_requests=2)
    fleet.add("w0", kv_total=(1000,))
    place(fleet, 900)
    wait = [fleet.ask(900), fleet.ask(900)]
    called_off = fleet.ask(10, tick=False, lease_s=LEASE_S, at_once=True, tenant="u")
    assert fleet.master.overview(fleet.now)["queue"]["requests"] == 2
    fleet.cancel(called_off)
    assert fleet.grant(called_off) is None
    assert place(fleet, 10, at_once=True, tenant="u").worker_id == "w0"
    assert list(fleet.master.intake.waiting) == wait


def test_service_of_who_does_not_wait_is_its_tenants_while_others_wait():
    fleet = a_fleet(kv_total=(100_000,))
    busy = place(fleet, 30_000)
    mine, theirs = fleet.ask(10, tenant="mine"), fleet.ask(10, tenant="theirs")
    place(fleet, 20_000, at_once=True, tenant="mine")
    shares = fleet.master.fleet.pools["m"].window.shares
    served = {t: shares.virtual_s[shares.find(t).row] for t in ("mine", "theirs")}
    assert served["mine"] > served["theirs"]
    assert {mine, theirs} == set(fleet.master.intake.waiting)
    done(fleet, busy)


def test_who_does_not_wait_is_refused_while_no_rank_is_linked():
    fleet = Fleet()
    fleet.add("w0", join=False)
    assert fleet.refusal(fleet.ask(10, lease_s=LEASE_S, at_once=True)).status == 503
    assert fleet.master.idle()


def test_many_that_do_not_wait_are_all_answered_in_bounded_rounds():
    fleet = a_fleet()
    asked = [fleet.ask(10, lease_s=LEASE_S, at_once=True, tick=False) for _ in range(50)]
    fleet.tick()
    assert sum(fleet.grant(request_id) is not None for request_id in asked) < 50
    while fleet.master.next_deadline() <= fleet.now:
        fleet.tick()
    assert all(fleet.grant(request_id) for request_id in asked)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_the_ledger_ends_at_zero(seed: int):
    source = random.Random(seed)
    fleet = Fleet()
    for i in range(3):
        fleet.add(f"w{i}", kv_total=(20_000,))
    asked: list[tuple[RequestId, bool]] = []
    for _ in range(80):
        match source.randrange(7):
            case 0 | 1 | 2:
                external = source.random() < 0.7
                request_id = fleet.ask(
                    range(source.randrange(1, 2000)),
                    lease_s=source.choice([0.3, 2.0, 60.0]) if external else 0.0,
                    at_once=external and source.random() < 0.5,
                )
                asked.append((request_id, external))
            case 3 if asked:
                fleet.cancel(source.choice(asked)[0])
            case 4 if asked:
                request_id, external = source.choice(asked)
                grant = fleet.grant(request_id)
                if grant is None:
                    pass
                elif not external:
                    fleet.finish(grant)
                else:
                    done(fleet, grant, source.choice(["done", "failed"]))
            case 5 if asked:
                grant = fleet.grant(source.choice(asked)[0])
                if grant is not None:
                    renew(fleet, grant, source.choice([0.2, 5.0]), source.random() < 0.5)
            case _:
                fleet.wait(source.choice([0.01, 0.3, 1.5]))
    for request_id, external in asked:
        grant = fleet.grant(request_id)
        if grant is None or external:
            fleet.cancel(request_id)
        else:
            fleet.finish(grant)
    fleet.wait(2.0)
    assert fleet.master.idle()
    assert fleet.master.map.num_arriving() == 0


def test_what_is_due_is_over_and_not_a_rounding_error_away_from_it():
    fleet = Fleet()
    fleet.add()
    booking = fleet.master.booked(fleet.grant(fleet.ask(lease_s=2.0)).request_id)
    at = 114434.80000000002
    assert at / TICK_S == 1144348, "the quotient is rounded down, or this shows nothing"
    times = DueTimes()
    times.set(booking, at)
    assert times.next_due >= at

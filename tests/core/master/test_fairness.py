"""Tenants beside each other: shares of service and queue, token rates, what is given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from rtp.core.events import From, FrontendDown
from rtp.core.master.tenants import Tenants, Terms
from rtp.core.messages import Done, Grant, Refuse
from rtp.core.types import RequestId
from tests.support.cluster import a_cluster, a_request
from tests.support.fleet import FRONTEND, Fleet, Worker, hashes_of

RATED = Terms(tokens_per_s=100.0, burst_tokens=1000.0)
OUTPUT = 16
"""Expected of each request: its max_tokens."""


def a_fleet(check: bool = True, terms: Terms | None = None, **settings: object) -> Fleet:
    """terms: of tenant "t", whose name the Fleet's asks bear by default."""
    tenants = Tenants({"t": terms} if terms else {})
    return Fleet(check=check, tenants=tenants, **settings)


def busy(fleet: Fleet) -> Worker:
    worker = fleet.add()
    fleet.report(worker, prefill_tokens=100_000, running=1)
    return worker


def serve(fleet: Fleet, worker: Worker, count: int) -> list[Grant]:
    """The next grants, each served before the one after it."""
    served: list[Grant] = []
    fleet.report(worker, prefill_tokens=0, running=0)
    while len(served) < count:
        fresh = fleet.grants()[len(served) :]
        assert fresh, "nothing more was granted"
        for grant in fresh:
            fleet.now += 0.01
            fleet.finish(grant)
            served.append(grant)
    return served[:count]


def tenants_of(asked: dict[RequestId, str], grants: list[Grant]) -> list[str]:
    return [asked[grant.request_id] for grant in grants]


def gate_counts(fleet: Fleet) -> dict[str, int]:
    counts: dict[str, int] = fleet.master.overview(fleet.now)["refused"]
    return {gate: count for gate, count in counts.items() if count}


# ---------------------------------------------------------------- shares of service


def test_a_flood_of_10_000_delays_the_lone_request_of_another_by_one_service_at_most():
    fleet = a_fleet(check=False)
    worker = busy(fleet)
    for _ in range(10_000):
        fleet.ask(2, tick=False, tenant="flood")
    fleet.now += 100.0  # all of them are overdue
    served = serve(fleet, worker, 3)
    lone = fleet.ask(200, tenant="lone")
    under_way = len(fleet.grants())
    assert fleet.grant(lone) is None, "the rank is busy"
    for grant in fleet.grants()[len(served) :]:
        fleet.finish(grant)
    assert [grant.request_id for grant in fleet.grants()].index(lone) == under_way


def test_service_goes_by_weight_while_both_wait():
    fleet = Fleet(tenants=Tenants({"double": Terms(weight=2.0)}))
    worker = busy(fleet)
    asked = {}
    for tenant in ["single", "double"] * 30:
        asked[fleet.ask(800, tenant=tenant)] = tenant
    counts = Counter(tenants_of(asked, serve(fleet, worker, 30)))
    assert counts == {"single": 10, "double": 20}


def test_shares_count_service_not_requests():
    """A tenant of long prompts gets fewer of them through than one of short prompts."""
    fleet = a_fleet()
    worker = busy(fleet)
    asked = {}
    for tenant, tokens in [("long", 3000), ("short", 1000)] * 30:
        asked[fleet.ask(tokens, tenant=tenant)] = tenant
    counts = Counter(tenants_of(asked, serve(fleet, worker, 20)))
    assert 2 <= counts["short"] / counts["long"] <= 3


def test_a_tenant_whose_requests_find_no_room_leaves_the_ranks_to_others():
    fleet = a_fleet()
    worker = busy(fleet)
    fleet.report(worker, kv_free=3000)
    large = fleet.ask(5000, tenant="large")
    small = fleet.ask(100, tenant="small")
    fleet.report(worker, prefill_tokens=0, running=1)
    assert fleet.grant(small) is not None
    assert fleet.grant(large) is None


# ---------------------------------------------------------------- shares of the queue


def test_a_full_queue_has_room_for_a_tenant_under_its_share():
    fleet = a_fleet(max_queue_requests=20)
    busy(fleet)
    flood = [fleet.ask(tenant="flood") for _ in range(25)]
    assert [fleet.refusal(r) is None for r in flood] == [True] * 20 + [False] * 5
    others = [fleet.ask(tenant="other") for _ in range(12)]
    assert [fleet.refusal(r) is None for r in others] == [True] * 10 + [False] * 2
    pushed = [r for r in flood[:20] if fleet.refusal(r) is not None]
    assert pushed == flood[10:20], "the newest make way"
    assert {(fleet.refusal(r).status, fleet.refusal(r).code) for r in pushed} == {
        (429, "rate_limit_exceeded")
    }
    assert all(fleet.refusal(r).retry_after_s >= 1 for r in pushed)
    assert fleet.master.overview(fleet.now)["queue"]["requests"] == 20
    assert gate_counts(fleet) == {"queue_requests": 7, "queue_share": 10}


def test_a_queue_full_of_tokens_has_room_for_a_tenant_under_its_share():
    fleet = a_fleet(max_queue_tokens=10_000)
    busy(fleet)
    flood = [fleet.ask(1000, tenant="flood") for _ in range(11)]
    assert fleet.refusal(flood[-1]).code == "rate_limit_exceeded"
    assert fleet.refusal(fleet.ask(4500, tenant="other")) is None
    assert fleet.master.overview(fleet.now)["queue"]["tokens"] <= 10_000
    assert fleet.refusal(fleet.ask(1000, tenant="other")) is not None, "it would pass its share"


def test_a_resumed_stream_is_not_pushed_out():
    fleet = a_fleet(max_queue_requests=1)
    busy(fleet)
    resumed = fleet.ask(tenant="flood", attempt=2, failed=True)
    fleet.ask(tenant="other")
    assert fleet.refusal(resumed) is None


def test_a_lone_tenants_predicted_ttft_does_not_count_the_backlog_of_others():
    fleet = a_fleet(check=False, ttft_limit_s=3.0)
    worker = fleet.add()
    fleet.report(worker, prefill_tokens=1000, running=1)
    flood = [fleet.ask(30_000, tick=False, tenant="flood") for _ in range(40)]
    assert any(fleet.refusal(r) for r in flood)
    assert gate_counts(fleet)["predicted_ttft"] > 0
    assert fleet.refusal(fleet.ask(100, tenant="lone")) is None


# ---------------------------------------------------------------- token rates


def test_a03_a_tenant_over_its_rate_is_refused_with_the_time_its_bucket_needs():
    fleet = a_fleet(terms=RATED)
    busy(fleet)
    assert fleet.refusal(fleet.ask(600 - OUTPUT)) is None
    refusal = fleet.refusal(fleet.ask(650 - OUTPUT))
    assert (refusal.status, refusal.code) == (429, "rate_limit_exceeded")
    assert refusal.retry_after_s == 3.0, "250 tokens at 100 a second, in whole seconds"
    assert "650 tokens" in refusal.reason
    assert gate_counts(fleet) == {"tenant_rate": 1}
    assert fleet.refusal(fleet.ask(400 - OUTPUT)) is None, "a smaller one still passes"
    assert fleet.refusal(fleet.ask(5000, tenant="other")) is None
    fleet.now += refusal.retry_after_s + 4.0
    assert fleet.refusal(fleet.ask(650 - OUTPUT)) is None


def test_only_uncached_tokens_count():
    fleet = a_fleet(terms=RATED)
    fleet.store(busy(fleet), hashes_of(range(960)))
    fleet.ask(range(961))
    assert fleet.master.tenants.level("t", fleet.now) == 1000 - 1 - OUTPUT


def test_a03_a_tenant_with_enough_waiting_is_refused_and_others_are_not():
    fleet = a_fleet(terms=Terms(max_waiting=2))
    busy(fleet)
    for _ in range(2):
        assert fleet.refusal(fleet.ask()) is None
    assert fleet.refusal(fleet.ask()).status == 429
    assert fleet.refusal(fleet.ask(tenant="other")) is None
    assert gate_counts(fleet) == {"tenant_queue": 1}


def test_a03_the_one_switch_turns_tenants_limits_off():
    fleet = a_fleet(terms=Terms(tokens_per_s=1.0, max_waiting=1), limits=False)
    busy(fleet)
    for _ in range(5):
        assert fleet.refusal(fleet.ask(500)) is None


def test_a_resumed_stream_passes_the_rate_and_is_charged():
    fleet = a_fleet(terms=RATED)
    busy(fleet)
    fleet.ask(900)
    assert fleet.refusal(fleet.ask(500)).status == 429
    assert fleet.refusal(fleet.ask(500, attempt=2, failed=True)) is None
    assert fleet.master.tenants.level("t", fleet.now) == 1000 - 916 - 516


# ---------------------------------------------------------------- what is given back


def finished(fleet: Fleet, request: RequestId) -> None:
    fleet.finish(
        fleet.grant(request), generated=40
    )  # which tells of 100 prompt tokens, none cached


def finished_cancelled(fleet: Fleet, request: RequestId) -> None:
    fleet.finish(fleet.grant(request), "cancelled", generated=5)


def rejected(fleet: Fleet, request: RequestId) -> None:
    fleet.finish(fleet.grant(request), "rejected", generated=0)


def failed(fleet: Fleet, request: RequestId) -> None:
    fleet.finish(fleet.grant(request), "failed", generated=7)


def cancelled(fleet: Fleet, request: RequestId) -> None:
    fleet.cancel(request)


def cancelled_after_tokens(fleet: Fleet, request: RequestId) -> None:
    fleet.first_token(fleet.grant(request), 100, 0, 0.01)
    fleet.cancel(request, generated=3)


def worker_lost(fleet: Fleet, request: RequestId) -> None:
    fleet.unlink(fleet.workers.pop("w0"))
    fleet.wait(3.5)


def lease_expired(fleet: Fleet, request: RequestId) -> None:
    fleet.wait(1.0)


def frontend_gone(fleet: Fleet, request: RequestId) -> None:
    fleet.tell(FrontendDown(FRONTEND))
    fleet.wait(1.0)  # its grant was not submitted


@pytest.mark.parametrize(
    ("end", "used"),
    [
        (finished, 140),
        (finished_cancelled, 105),
        (rejected, 0),
        (failed, 0),
        (cancelled, 0),
        (cancelled_after_tokens, 103),
        (worker_lost, 0),
        (lease_expired, 0),
        (frontend_gone, 0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_granted_request_is_charged_what_it_used_however_it_ends(
    end: Callable[[Fleet, RequestId], None], used: float
):
    fleet = a_fleet(terms=Terms(tokens_per_s=1e-6, burst_tokens=1000.0))
    fleet.add()
    request = fleet.ask(100)
    assert fleet.master.tenants.level("t", fleet.now) == pytest.approx(1000 - 100 - OUTPUT)
    end(fleet, request)
    assert fleet.master.idle()
    assert fleet.master.tenants.num_open == 0
    assert fleet.master.tenants.level("t", fleet.now) == pytest.approx(1000 - used, abs=0.01)
    assert fleet.master.tenants.usage["t"].used_tokens == used


@pytest.mark.parametrize(
    ("done", "used"),
    [
        (("done", 100, 32, 10), 78),
        (("done", 100, -1, 10), 100 + OUTPUT),
        (("done", 100, 32, -1), 100 + OUTPUT),
        (("failed", 100, 32, 10), 0),
        (None, 100 + OUTPUT),
    ],
    ids=["told", "cache untold", "output untold", "failed", "lapsed"],
)
def test_a_router_only_grant_counts_what_is_told_or_else_what_was_expected(
    done: tuple[str, int, int, int] | None, used: float
):
    fleet = a_fleet(terms=Terms(tokens_per_s=1e-6, burst_tokens=1000.0))
    fleet.add()
    request = fleet.ask(100, lease_s=2.0)
    if done is None:
        fleet.wait(2.2)
    else:
        fleet.tell(From(FRONTEND, Done(request, 1, *done)))
    assert fleet.master.idle()
    assert fleet.master.tenants.num_open == 0
    assert fleet.master.tenants.usage["t"].used_tokens == used


@pytest.mark.parametrize("end", ["cancel", "deadline", "no_worker", "replaced", "displaced"])
def test_a_waiting_request_that_gets_no_grant_costs_nothing(end: str):
    terms = Terms(tokens_per_s=1e-6, burst_tokens=1000.0)
    fleet = a_fleet(terms=terms, max_queue_requests=2)
    busy(fleet)
    request = fleet.ask(100, deadline_s=5.0)
    assert fleet.master.tenants.level("t", fleet.now) == pytest.approx(884)
    if end == "cancel":
        fleet.cancel(request)
    elif end == "deadline":
        fleet.wait(6.0)
        assert fleet.refusal(request).status == 504
    elif end == "no_worker":
        fleet.unlink(fleet.workers.pop("w0"))
        fleet.wait(4.0)
        assert fleet.refusal(request).status == 503
    elif end == "displaced":
        fleet.ask(100, deadline_s=600.0)
        fleet.ask(50, tenant="other")
        assert len(fleet.sent(Refuse)) == 1
        fleet.wait(6.0)
        assert fleet.master.tenants.level("t", fleet.now) == pytest.approx(1000, abs=0.01)
        return
    else:
        fleet.ask(300, request_id=request, attempt=2)
        assert fleet.master.tenants.level("t", fleet.now) == pytest.approx(684)
        fleet.cancel(request, attempt=2)
    assert fleet.master.tenants.num_open == 0
    assert fleet.master.tenants.level("t", fleet.now) == pytest.approx(1000, abs=0.01)


# ---------------------------------------------------------------- what people see


def test_b01_named_tenants_are_shown_and_all_others_together():
    fleet = a_fleet(terms=RATED)
    fleet.add()
    for i in range(50):
        fleet.finish(fleet.grant(fleet.ask(20, tenant=f"nobody-{i}")), generated=5)
    fleet.finish(fleet.grant(fleet.ask(20)), generated=5)
    fleet.ask(3000)
    fleet.ask(3000)
    shown = fleet.master.overview(fleet.now)["tenants"]
    assert list(shown["named"]) == ["t"]
    assert shown["named"]["t"]["admitted"] == 1
    assert shown["named"]["t"]["refused"] == 2
    assert shown["named"]["t"]["used_tokens"] == 105
    assert shown["others"]["admitted"] == 50
    assert "nobody" not in repr(shown)


# ---------------------------------------------------------------- whole clusters in virtual time


def a_prompt(number: int) -> list[int]:
    """500 tokens; no two numbers share a block."""
    return [5 + number, *range(1000, 1499)]


def first_token_s(num_flood: int, tenant: str) -> float:
    """Virtual seconds to the first token of a lone request, a second into another's flood."""
    cluster = a_cluster(workers=2, runner={"num_blocks": 4096})
    for i in range(num_flood):
        cluster.begin(a_request(tokens=a_prompt(i), tenant="flood"))
    lone = cluster.run(a_request(tokens=a_prompt(900), at=1.0, tenant=tenant))
    assert lone.first_token_at is not None
    return lone.first_token_at - lone.begun_at


def test_in_a_flood_the_first_token_of_another_tenant_is_late_by_one_service_at_most():
    alone_s = first_token_s(0, "lone")
    assert first_token_s(80, "lone") <= 2 * alone_s
    assert first_token_s(80, "flood") > 10 * alone_s, "its own wait behind each other"

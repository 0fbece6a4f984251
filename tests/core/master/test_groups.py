"""Workers whose ranks step together, as the Master sees them: one availability, grants by round."""

from __future__ import annotations

from rtp.core.events import From
from rtp.core.master.master import NUMBERS_A_TERM
from rtp.core.messages import Grant, Renew
from rtp.core.types import RequestId, Role
from tests.support.fleet import FRONTEND, Fleet, Worker, hashes_of


def a_group(fleet: Fleet, name: str = "g", ranks: int = 4, **fields: object) -> Worker:
    return fleet.add(name, ranks=ranks, lockstep=True, **fields)


def occupy(fleet: Fleet, worker: Worker) -> Grant:
    """A request that keeps a rank busy for as long as reports say so."""
    start = 100_000 * len(fleet.grants())
    grant = fleet.grant(fleet.ask(range(start, start + 20_000)))
    assert grant is not None
    worker.see(grant)
    worker.load[grant.rank] = {"running": 1, "prefill_tokens": 1_000_000}
    fleet.report(worker)
    return grant


def free(fleet: Fleet, worker: Worker) -> None:
    for load in worker.load:
        load |= {"running": 0, "prefill_tokens": 0}
    fleet.report(worker)


def lengths(fleet: Fleet, *tokens: int, first: int = 1, **fields: object) -> list[RequestId]:
    """One request each, of so many tokens that nobody has."""
    ids = []
    for number, count in enumerate(tokens):
        fleet.now += 1e-4
        start = 1_000_000 * (first + number)
        ids.append(fleet.ask(range(start, start + count), **fields))
    return ids


def granted(fleet: Fleet, ids: list[RequestId]) -> list[Grant | None]:
    return [fleet.grant(request_id) for request_id in ids]


def test_a_group_is_busy_until_its_slowest_rank_is_done():
    """The paper's max over running r of (t_start + t_prefill); other ranks are each for itself."""
    for lockstep in (False, True):
        fleet = Fleet()
        worker = fleet.add("g", ranks=4, lockstep=lockstep)
        occupy(fleet, worker)
        ranks = fleet.master.overview(fleet.now)["workers"]["g"]["ranks"]
        assert len({rank["busy_s"] for rank in ranks}) == (1 if lockstep else 2)
        (waiting,) = lengths(fleet, 100)
        assert (fleet.grant(waiting) is None) == lockstep
        free(fleet, worker)
        assert fleet.grant(waiting) is not None


def test_like_lengths_start_together_on_different_ranks():
    fleet = Fleet()
    worker = a_group(fleet)
    occupy(fleet, worker)
    ids = lengths(fleet, 1000, 9000, 1100, 8000, 900, 1200)
    assert granted(fleet, ids) == [None] * 6
    free(fleet, worker)
    first, *_ = grants = [grant for grant in granted(fleet, ids) if grant is not None]
    assert sorted(grant.rank for grant in grants) == [0, 1, 2, 3]
    assert {(grant.group_id, grant.group_size) for grant in grants} == {(first.group_id, 4)}
    assert {grant.request_id for grant in grants} == {ids[0], ids[2], ids[4], ids[5]}
    assert fleet.master.overview(fleet.now)["groups"] == {"rounds": 1, "grants": 4}
    for grant in grants:
        worker.see(grant)
    free(fleet, worker)
    long = [fleet.grant(ids[1]), fleet.grant(ids[3])]
    assert [(grant.group_id, grant.group_size) for grant in long if grant] == [(1, 2)] * 2


def test_the_ranks_of_a_round_are_chosen_by_the_policy():
    fleet = Fleet()
    worker = a_group(fleet)
    shared = range(5_000_000, 5_003_200)
    fleet.store(worker, hashes_of(shared), rank=2)
    occupy(fleet, worker)
    ids = lengths(fleet, 1000)
    ids.append(fleet.ask(range(5_000_000, 5_004_200)))  # 1,000 of them new on rank 2
    free(fleet, worker)
    grants = granted(fleet, ids)
    assert all(grant is not None and grant.group_size == 2 for grant in grants)
    assert [(grant.rank == 2, grant.matched_tokens) for grant in grants if grant] == [
        (False, 0),
        (True, 3200),
    ]


def test_only_ranks_that_can_take_more_get_company():
    fleet = Fleet()
    worker = a_group(fleet, max_rows=1)
    occupy(fleet, worker)
    ids = lengths(fleet, 5000, 5000, 5000, 5000)
    for rank in (1, 3):
        worker.load[rank] = {"running": 2}
    fleet.report(worker)
    worker.load[0] |= {"running": 0, "prefill_tokens": 0}
    fleet.report(worker)
    grants = [grant for grant in granted(fleet, ids) if grant is not None]
    assert sorted(grant.rank for grant in grants) == [0, 2]
    assert {grant.group_size for grant in grants} == {2}


def test_a_group_that_failed_a_request_is_no_place_for_it():
    fleet = Fleet()
    worker = a_group(fleet)
    occupy(fleet, worker)
    occupy(fleet, fleet.add("other"))
    ids = lengths(fleet, 500)
    ids.append(fleet.ask(range(7_000_000, 7_000_500), exclude=(worker.id,)))
    free(fleet, worker)
    first, excluded = granted(fleet, ids)
    assert first is not None
    assert (first.worker_id, first.group_size) == (worker.id, 1)
    assert excluded is None


def test_an_overdue_request_leads_every_fourth_round():
    """However many grants a round has: short ones cannot keep a long one waiting for ever."""
    fleet = Fleet()
    worker = a_group(fleet)
    occupy(fleet, worker)
    old, *others = lengths(fleet, 30_000, *[4_000] * 16)
    fleet.wait(31.0)
    for number in (1, 2):
        free(fleet, worker)
        for grant in fleet.grants():
            worker.see(grant)
        assert fleet.master.overview(fleet.now)["groups"]["grants"] == 4 * number
        assert fleet.grant(old) is None, "shorter ones have waited more of their service"
    free(fleet, worker)
    grant = fleet.grant(old)
    assert grant is not None
    assert grant.group_size == 4
    assert sum(found is None for found in granted(fleet, others)) == 16 - 4 - 4 - 3


def test_rounds_are_shared_between_tenants():
    """Company does not go by who has most waiting."""
    fleet = Fleet()
    worker = a_group(fleet)
    occupy(fleet, worker)
    flood = lengths(fleet, *[5_000] * 20, tenant="flood")
    others = lengths(fleet, *[5_000] * 4, first=50, tenant="quiet")
    for _ in range(2):
        free(fleet, worker)
        for grant in fleet.grants():
            worker.see(grant)
    assert all(grant is not None for grant in granted(fleet, others))
    assert sum(grant is not None for grant in granted(fleet, flood)) == 4


def test_a_round_of_prefill_ranks_shares_the_decode_ranks():
    """As far as they have headroom for all of it together, though each is charged at its grant."""
    for kv_total, size in ((100_000, 4), (2 * (5000 + 16) + 100, 2)):
        fleet = Fleet()
        worker = a_group(fleet, role=Role.PREFILL, transports=("sim",))
        fleet.add("d", role=Role.DECODE, transports=("sim",), kv_total=(kv_total,))
        ids = [fleet.ask(range(at, at + 5000), tick=False) for at in range(0, 400_000, 100_000)]
        fleet.tick()
        grants = [grant for grant in granted(fleet, ids) if grant is not None]
        assert [grant.worker_id for grant in grants] == [worker.id] * size
        assert {grant.group_size for grant in grants} == {size}
        assert [grant.decode and grant.decode.worker_id for grant in grants] == ["d"] * size
        numbers = sorted(grant.decode.number for grant in grants if grant.decode)
        assert numbers == [*range(NUMBERS_A_TERM, NUMBERS_A_TERM + size)]


def test_what_a_group_lost_leaves_nothing_behind():
    fleet = Fleet()
    worker = a_group(fleet)
    occupy(fleet, worker)
    fleet.unlink(worker)
    fleet.wait(4.0)
    assert fleet.state("g") == "lost"
    assert fleet.master.ranks.groups == {}
    fleet.add("single", ranks=4)
    grants = granted(fleet, lengths(fleet, 20_000, 20_000))
    assert all(grant is not None and grant.group_id < 0 for grant in grants)


def test_a_grant_that_ends_unseen_frees_its_group_with_the_next_report():
    fleet = Fleet()
    worker = a_group(fleet)
    (first,) = lengths(fleet, 20_000)
    fleet.cancel(first)
    (second,) = lengths(fleet, 500)
    assert fleet.grant(second) is None
    fleet.report(worker)
    assert fleet.grant(second) is not None


def test_places_for_engines_of_others_start_with_nobody():
    """They submit to no rank of ours. One that is prefilled early leaves its group as busy as the
    other ranks are, for all that is known."""
    fleet = Fleet()
    worker = a_group(fleet)
    ids = [
        fleet.ask(range(at, at + 20_000), tick=False, lease_s=lease_s)
        for at, lease_s in ((0, 60.0), (100_000, 0.0), (200_000, 60.0))
    ]
    fleet.tick()
    leader = next(grant for grant in granted(fleet, ids) if grant is not None)
    assert leader.group_size == 1
    for request_id in ids[::2]:
        fleet.tell(From(FRONTEND, Renew(request_id, 1, 60.0, True)))
    assert sum(grant is not None for grant in granted(fleet, ids)) == 1
    fleet.report(worker)
    fleet.report(worker)
    assert {grant.group_size for grant in granted(fleet, ids) if grant is not None} == {1}

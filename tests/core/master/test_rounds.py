"""Decisions: bursts, affinity, arriving prefixes, holds, room, order, fallbacks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rtp.core.events import LoopBusy, Tick
from rtp.core.master.master import NUMBERS_A_TERM
from rtp.core.master.placement import RELAXED, SATURATED
from rtp.core.master.ranks import MOST_HELD
from rtp.core.master.rounds import MOST_LOOKS
from rtp.core.master.window import OVERDUE_S
from rtp.core.policy import Candidates, Predict, Query
from rtp.core.types import FloatArray, WorkerId
from tests.support.fleet import FRONTEND, Fleet, hashes_of

PROMPT = range(4096)
TAIL = range(4097)


def test_an_ask_grants_nothing_before_the_tick_of_its_turn():
    fleet = Fleet()
    fleet.add()
    request = fleet.ask(tick=False)
    assert fleet.grant(request) is None
    assert fleet.master.next_deadline() == fleet.now
    fleet.tick()
    grant = fleet.grant(request)
    assert (grant.number, grant.lease_s) == (NUMBERS_A_TERM, 0.25)
    assert fleet.master.next_deadline() > fleet.now


def test_w08_a_burst_of_100_in_one_turn_spreads_over_8_equal_ranks():
    fleet = Fleet()
    for i in range(8):
        fleet.add(f"w{i}")
    for _ in range(100):
        fleet.ask(100, tick=False)
    fleet.tick()
    start = fleet.now
    while len(fleet.grants()) < 100:
        fleet.now = fleet.master.next_deadline()
        fleet.tick()
    assert fleet.now - start < 0.1
    counts = Counter(grant.worker_id for grant in fleet.grants())
    assert len(counts) == 8
    assert max(counts.values()) <= 2 * 100 / 8


def test_a_round_looks_at_16_requests_and_the_next_one_follows_at_once():
    fleet = Fleet()
    for i in range(8):
        fleet.add(f"w{i}", profile=(1e-6, 1e-8, 1e-14, 1e-3, 1e-4, 1e-8))
    for _ in range(40):
        fleet.ask(100, tick=False)
    fleet.tick()
    assert len(fleet.grants()) == MOST_LOOKS
    assert fleet.master.next_deadline() - fleet.now <= 0.0011


def test_w02_a_rank_gets_no_more_requests_than_it_has_rows():
    """A shared prefix draws all to the ranks that hold it: what they cannot run at once waits where
    it can still go elsewhere. A request that waits for its reader has no row."""
    fleet = Fleet()
    workers = [fleet.add("near", max_rows=32), fleet.add("far", max_rows=32)]
    head = range(512)
    fleet.store(workers[0], hashes_of(head))
    for i in range(80):
        fleet.ask([*head, 5000 + i])

    def placed() -> list[int]:
        for _ in range(40):
            for worker in workers:
                mine = [g for g in fleet.grants() if g.worker_id == worker.id]
                for grant in mine:
                    worker.see(grant)
                rows = min(32, len(mine))
                load = {"running": rows, "waiting": len(mine) - rows, "decode_rows": rows}
                fleet.report(worker, **load, kv_free=90_000)
            fleet.now += 0.02
        return [sum(g.worker_id == w.id for g in fleet.grants()) for w in workers]

    assert placed() == [35, 35]
    workers[1].parked = tuple(g.request_id for g in fleet.grants() if g.worker_id == "far")[:4]
    assert placed() == [35, 39]


def test_w01_a_miss_goes_to_the_idle_rank_not_to_the_lowest_number():
    fleet = Fleet()
    busy, idle = fleet.add("w0"), fleet.add("w1")
    fleet.report(busy, running=40, decode_rows=40, context_tokens=40_000, kv_free=60_000)
    for i in range(100):
        fleet.store(idle, hashes_of(range(i, i + 64)))
    for _ in range(5):
        grant = fleet.grant(fleet.ask())
        assert grant.worker_id == idle.id
        fleet.finish(grant)


def test_the_second_turn_of_a_chat_returns_to_its_prefix():
    fleet = Fleet()
    for i in range(4):
        fleet.add(f"w{i}")
    first = fleet.grant(fleet.ask(range(512)))
    fleet.first_token(first, 512, 0, 0.006)
    fleet.finish(first)
    fleet.store(fleet.workers[first.worker_id], hashes_of(range(512)))
    fleet.wait(1.0)
    again = fleet.grant(fleet.ask(range(640)))
    assert (again.worker_id, again.matched_tokens) == (first.worker_id, 512)


def test_a_full_hit_still_computes_the_last_token():
    fleet = Fleet()
    fleet.store(fleet.add(), hashes_of(range(512)))
    assert fleet.grant(fleet.ask(range(512))).matched_tokens == 496


def test_two_equal_prompts_at_once_meet_on_one_rank():
    fleet = Fleet()
    for i in range(4):
        fleet.add(f"w{i}")
    first, second = fleet.ask(range(1000), tick=False), fleet.ask(range(1000), tick=False)
    fleet.tick()
    fleet.wait(0.2)
    assert fleet.grant(first).worker_id == fleet.grant(second).worker_id
    assert fleet.grant(second).matched_tokens == 992


def test_arrivals_that_failed_earn_no_credit():
    fleet = Fleet()
    fleet.add("w0")
    fleet.add("w1")
    first = fleet.grant(fleet.ask(range(1000)))
    fleet.finish(first, "failed")
    assert fleet.grant(fleet.ask(range(1000))).matched_tokens == 0


# ---------------------------------------------------------------- holds


def hold_fleet(wait_s: float, prompt: range = PROMPT, **settings: object) -> Fleet:
    """ "busy" holds the prompt and is free in wait_s; "idle" would compute it: 42.8 ms."""
    fleet = Fleet(**settings)
    busy = fleet.add("busy")
    fleet.add("idle")
    fleet.store(busy, hashes_of(prompt))
    a, b, c, *_ = busy.register.profile
    chunk = 2048
    tokens = round(wait_s / ((a + b * chunk + c * chunk * chunk / 2) / chunk))
    fleet.report(busy, prefill_tokens=tokens)
    return fleet


class Listener:
    """Notes what it is told of the backlog."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        self.told.append(query.backlog_s)
        return np.zeros(len(candidates.rank_ids))


def test_a_master_without_time_left_tells_of_no_backlog_until_it_has_some_again():
    """What waits makes a policy hold more, and a hold costs a second look."""
    for shares, tells in (
        ((SATURATED,), True),
        ((1.0,), False),
        ((1.0, (SATURATED + RELAXED) / 2), False),
        ((1.0, RELAXED - 0.01), True),
    ):
        listener = Listener()
        fleet = Fleet(listener)
        worker = fleet.add("w")
        fleet.report(worker, prefill_tokens=100_000)
        for _ in range(3):
            fleet.ask(1000)
        for share in shares:
            fleet.tell(LoopBusy(share))
        fleet.report(worker, prefill_tokens=0)
        assert (listener.told[0] > 0) == tells
        assert fleet.master.overview(fleet.now)["policy"]["tells_backlog"] == tells


def test_a_request_is_held_for_a_busy_rank_when_that_is_predicted_to_be_sooner():
    fleet = hold_fleet(wait_s=0.07)  # 0.07 + 2 * 1.0 ms < 2 * 42.8 ms
    request = fleet.ask(TAIL)
    assert fleet.grant(request) is None
    assert fleet.master.overview(fleet.now)["queue"]["held"] == 1
    other = fleet.ask(100)
    at_once = fleet.grant(other)
    assert at_once.worker_id == "idle", "it blocks nobody"
    fleet.report(fleet.workers["busy"], prefill_tokens=0)
    late = fleet.grant(request)
    assert late.worker_id == "busy"
    assert late.held
    assert not at_once.held
    assert fleet.master.overview(fleet.now)["queue"]["held"] == 0


def test_no_hold_when_the_wait_costs_more_than_it_saves():
    fleet = hold_fleet(wait_s=0.1)
    assert fleet.grant(fleet.ask(TAIL)).worker_id == "idle"


def test_at_most_three_are_held_per_rank_and_each_is_charged_to_it():
    fleet = hold_fleet(wait_s=0.07)
    for i in range(4):
        fleet.add(f"idle{i}")
    requests = [fleet.ask(range(4097 + i)) for i in range(8)]
    ranks = fleet.master.ranks
    row = fleet.master.fleet.row_of((WorkerId("busy"), 0))
    assert ranks.held[row] == MOST_HELD == ranks.held.max()
    assert ranks.held_s[row] == pytest.approx(3 * 1.01e-3, rel=0.5)
    assert fleet.grants(), "everybody else takes the best rank there is"
    for request in requests:
        fleet.cancel(request)
    assert not ranks.held_s.any()


def test_of_those_held_for_a_rank_only_the_next_is_looked_at_when_it_is_free():
    fleet = hold_fleet(wait_s=0.04)
    first, second = fleet.ask(range(7168)), fleet.ask(range(7169))  # over 30 ms each
    ranks, placements = fleet.master.ranks, fleet.master.placements
    row = fleet.master.fleet.row_of((WorkerId("busy"), 0))
    assert ranks.held[row] == 2
    looks, held_s = placements.num_looks, ranks.held_s[row]
    fleet.report(fleet.workers["busy"], prefill_tokens=0)
    assert fleet.grant(first).worker_id == "busy"
    assert fleet.grant(second) is None
    assert placements.num_looks == looks + 1
    assert ranks.held[row] == 1
    assert 0 < ranks.held_s[row] < held_s, "the other is charged as before"
    fleet.wait(0.05, beat=False)
    assert fleet.grant(second).worker_id == "busy"
    assert placements.num_looks == looks + 2
    assert ranks.held[row] == ranks.held_s[row] == 0


def test_held_requests_follow_each_other_as_long_as_their_rank_is_free():
    fleet = hold_fleet(wait_s=0.07)
    requests = [fleet.ask(range(4097 + i)) for i in range(3)]
    row = fleet.master.fleet.row_of((WorkerId("busy"), 0))
    assert fleet.master.ranks.held[row] == 3
    fleet.report(fleet.workers["busy"], prefill_tokens=0)
    assert [fleet.grant(request).worker_id for request in requests] == ["busy"] * 3
    assert not fleet.master.ranks.held.any()


def test_a_hold_ends_when_the_rank_does_not_get_free_as_predicted():
    fleet = hold_fleet(wait_s=0.07)
    request = fleet.ask(TAIL)
    fleet.report(fleet.workers["busy"], prefill_tokens=200_000)
    fleet.wait(0.2, beat=False)
    assert fleet.grant(request).worker_id == "idle"


def test_a_hold_ends_when_its_rank_is_suspect():
    fleet = hold_fleet(wait_s=0.07)
    request = fleet.ask(TAIL)
    fleet.unlink(fleet.workers["busy"])
    assert fleet.grant(request).worker_id == "idle"


def test_a_policy_that_does_not_look_at_caches_holds_nothing():
    fleet = hold_fleet(wait_s=0.07, routing="least_loaded")
    assert fleet.grant(fleet.ask(TAIL)).worker_id == "idle"


# ---------------------------------------------------------------- availability, room


def test_a_long_prefill_closes_a_rank_and_short_ones_may_wait_on_it():
    fleet = Fleet()
    fleet.add()
    assert fleet.grant(fleet.ask(200)) is not None  # 3 ms
    assert fleet.grant(fleet.ask(5000)) is not None  # 52 ms: over the lead from here on
    waiting = fleet.ask(100)
    assert fleet.grant(waiting) is None
    free_at = fleet.master.next_deadline()
    assert 0.02 < free_at - fleet.now < 0.05
    fleet.wait(free_at - fleet.now + 0.001, beat=False)
    assert fleet.grant(waiting) is not None, "a grant leaves before the rank is free"


def test_decode_rows_slow_a_prefill_and_so_the_rank_is_busy_for_longer():
    fleet = Fleet()
    plain, loaded = fleet.add("plain"), fleet.add("loaded")
    fleet.report(plain, prefill_tokens=4000)
    fleet.report(loaded, prefill_tokens=4000, decode_rows=256, context_tokens=90_000)
    busy = fleet.master.ranks.busy_until - fleet.now
    assert 1.5 * busy[0] < busy[1] < 5 * busy[0]


def test_what_a_step_has_run_already_is_not_waited_for_again():
    """A whole prompt in one step: its beats move the end of the work neither on nor back."""
    fleet = Fleet()
    worker = fleet.add()
    fleet.report(worker, running=1, prefill_tokens=2000)
    ends = fleet.master.ranks.busy_until[0]
    fleet.now += 0.01
    fleet.report(worker, running=1, prefill_tokens=2000, step_age_us=10_000)
    assert abs(fleet.master.ranks.busy_until[0] - ends) < 1e-6
    fleet.now += 5.0
    fleet.report(worker, running=1, prefill_tokens=2000, step_age_us=5_010_000)
    assert fleet.master.ranks.busy_until[0] == fleet.now, "later than predicted: due any moment"


def test_back_pressure_without_room_for_the_expected_output():
    fleet = Fleet()
    worker = fleet.add(kv_total=(10_000,))
    fleet.report(worker, running=5, decode_rows=5, context_tokens=9000, kv_free=1000)
    request = fleet.ask(950, max_tokens=100)
    assert fleet.grant(request) is None
    fleet.report(worker, kv_free=1100)
    assert fleet.grant(request) is not None


def test_a08_small_requests_pass_a_large_one_and_do_not_pass_it_for_ever():
    fleet = Fleet()
    worker = fleet.add(kv_total=(10_000,))
    fleet.report(worker, running=5, decode_rows=5, context_tokens=6000, kv_free=4000)
    large = fleet.ask(6000)
    small = [fleet.ask(100) for _ in range(3)]
    assert fleet.grant(large) is None
    assert None not in [fleet.grant(r) for r in small]
    for request in small:
        fleet.finish(fleet.grant(request))
    fleet.wait(OVERDUE_S + 1)
    passed = 0
    for _ in range(20):  # the pool drains only if no more small ones are let in
        request = fleet.ask(100)
        if fleet.grant(request):
            passed += 1
            fleet.finish(fleet.grant(request))
        fleet.wait(0.1)
    assert passed <= 4
    fleet.report(worker, kv_free=9500, context_tokens=500)
    assert fleet.grant(large) is not None
    fleet.finish(fleet.grant(large))
    fleet.wait(1.0)
    assert len(fleet.grants()) == 3 + 20 + 1


def test_a_request_of_one_model_does_not_wait_behind_those_of_another():
    fleet = Fleet()
    fleet.report(fleet.add("a", model="a"), prefill_tokens=90_000)
    fleet.add("b", model="b")
    for _ in range(20):
        assert fleet.grant(fleet.ask(model="a")) is None
    assert fleet.grant(fleet.ask(model="b")).worker_id == "b"


# ---------------------------------------------------------------- chats


def test_x19_r06_a_chat_finds_its_worker_again_and_only_its_own_chats_move():
    fleet = Fleet()
    for i in range(4):
        fleet.add(f"w{i}", address=f"10.0.0.1:{i}")
    place = {}
    for i in range(40):
        grant = fleet.grant(fleet.ask(10, chat_id=f"c{i}"))
        place[f"c{i}"] = grant.worker_id
        fleet.finish(grant)
    fleet.add("w1", epoch=2, address="10.0.0.1:1")

    def turn(chat: str) -> str:
        grant = fleet.grant(fleet.ask(10, chat_id=chat))
        fleet.finish(grant)
        return grant.worker_id

    assert {chat: turn(chat) for chat in place} == place, "equal ranks: its own goes first"
    fleet.unlink(fleet.workers["w1"])
    moved = {chat for chat in place if turn(chat) != place[chat]}
    assert moved == {chat for chat, worker in place.items() if worker == "w1"}


def test_affinity_is_dropped_when_its_rank_is_saturated():
    fleet = Fleet()
    fleet.add("w0")
    fleet.add("w1")
    home = fleet.grant(fleet.ask(10, chat_id="c"))
    fleet.finish(home)
    fleet.report(fleet.workers[home.worker_id], prefill_tokens=50_000)
    assert fleet.grant(fleet.ask(10, chat_id="c")).worker_id != home.worker_id


# ---------------------------------------------------------------- policies that misbehave


class Broken:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [np.array([np.nan, 1.0]), np.zeros(7), "text", None, RuntimeError("no"), 3.0],
    ids=["nan", "shape", "text", "none", "raises", "scalar"],
)
def test_a_policy_that_fails_falls_back_to_the_least_wait_and_is_counted(answer: object):
    fleet = Fleet(Broken(answer))
    fleet.add("w0")
    fleet.add("w1")
    fleet.report(fleet.workers["w0"], prefill_tokens=1000)
    assert fleet.grant(fleet.ask()).worker_id == "w1"
    policy = fleet.master.overview(fleet.now)["policy"]
    assert policy["fallbacks"] == 1
    assert policy["last_fallback"]
    assert len(fleet.notes("policy.failed")) == 1


def test_a_policy_that_writes_into_its_columns_falls_back_and_changes_nothing():
    class Greedy:
        def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
            getattr(candidates, self.column)[:] = 0
            return -candidates.wait_s

    policy = Greedy()
    fleet = Fleet(policy)
    fleet.add("w0")
    fleet.add("w1")
    for column in Candidates.__dataclass_fields__:
        policy.column = column
        fleet.report(fleet.workers["w0"], prefill_tokens=1000, running=1)
        grant = fleet.grant(fleet.ask())
        assert grant.worker_id == "w1"
        fleet.finish(grant)
    shown = fleet.master.overview(fleet.now)["policy"]
    assert shown["fallbacks"] == len(Candidates.__dataclass_fields__)
    assert fleet.state("w0") == fleet.state("w1") == "live"


def test_a_policy_that_fails_once_is_asked_again():
    policy = Broken(RuntimeError("no"))
    fleet = Fleet(policy)
    fleet.add("w0")
    fleet.add("w1")
    assert fleet.grant(fleet.ask()).worker_id == "w0"
    policy.answer = np.array([0.0, 1.0])
    request = fleet.ask()
    assert fleet.grant(request).worker_id == "w1"
    assert fleet.master.placement(request)["fallback"] == ""


def test_scores_that_differ_by_less_than_a_microsecond_are_equal():
    fleet = Fleet(Broken(np.array([1.0, 1.0 + 1e-8])))
    fleet.add("w0")
    fleet.add("w1")
    assert fleet.grant(fleet.ask()).worker_id == "w0"


# ---------------------------------------------------------------- reasons, overview


def test_a_placement_can_be_asked_for_with_its_numbers():
    fleet = Fleet(kept_placements=2)
    for i in range(6):
        fleet.store(fleet.add(f"w{i}"), hashes_of(range(160 * i)))
    request = fleet.ask(range(801))
    told = fleet.master.placement(request)
    assert told["num_candidates"] == 6
    assert told["candidates"][0]["worker_id"] == fleet.grant(request).worker_id == "w5"
    assert told["candidates"][0]["chosen"]
    assert told["candidates"][0]["matched_tokens"] == 800
    scores = [c["score"] for c in told["candidates"]]
    assert scores == sorted(scores, reverse=True)
    for _ in range(2):
        fleet.ask()
    assert fleet.master.placement(request) is None


def test_the_overview_is_plain_json():
    import json

    fleet = hold_fleet(wait_s=0.07)
    fleet.ask(TAIL)
    grant = fleet.grant(fleet.ask(50))
    fleet.first_token(grant, 50, 0, 0.002)
    fleet.unlink(fleet.workers["busy"])
    fleet.wait(4.0)
    told = json.loads(json.dumps(fleet.master.overview(fleet.now), allow_nan=False))
    assert told["term"] == 1
    assert told["workers"]["idle"]["ranks"][0]["kv_total"] == 100_000
    assert told["departed"][-1]["state"] == "lost"


def test_the_same_events_give_the_same_commands():
    def run() -> list:
        fleet = Fleet("random")
        for i in range(5):
            fleet.add(f"w{i}")
        for i in range(60):
            fleet.ask(37 * i % 900 + 1, tick=i % 3 == 0, priority=i % 5)
        fleet.wait(2.0)
        fleet.tell(Tick())
        return fleet.out

    assert run() == run()


def test_grants_go_to_the_frontend_that_asked():
    fleet = Fleet()
    fleet.add()
    request = fleet.ask(frontend_id="g")
    peers = [c.peer for c in fleet.out if getattr(c, "message", None) is fleet.grant(request)]
    assert peers == ["g"] != [FRONTEND]

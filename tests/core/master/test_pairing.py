"""Splitting requests: arithmetic of headroom and choice, and reservations that all come back."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from msgspec.structs import replace

from rtp.core.commands import Send
from rtp.core.events import From
from rtp.core.master.fleet import MOST_OWED
from rtp.core.master.master import LEASE_MARGIN_S, LEASE_S, NUMBERS_A_TERM
from rtp.core.master.rounds import MOST_IN_LINE
from rtp.core.messages import Fence, Finished, Grant, Now, Place, WorkerLost
from rtp.core.policy import Candidates, Predict, Query
from rtp.core.types import FloatArray, Role, WorkerId
from tests.support.fleet import Fleet, Worker, hashes_of

EXPIRY_S = LEASE_S + LEASE_MARGIN_S
SLOW = (0.001, 1000.0)
"""1 ms, and 1 ms a token."""


def split(decodes: int = 2, **decode: object) -> Fleet:
    """p prefills, d0 .. decode; bringing pages takes no time. E[output] is max_tokens, 16, for the
    Master has seen nothing shorter."""
    fleet = Fleet()
    fleet.add("p", role=Role.PREFILL, transports=("sim",))
    for index in range(decodes):
        fields = {"transports": ("sim",)} | decode
        fleet.add(f"d{index}", role=Role.DECODE, **fields)
    return fleet


def granted(fleet: Fleet, tokens: int = 100, **fields: object) -> Grant:
    grant = fleet.grant(fleet.ask(tokens, **fields))
    assert grant is not None
    return grant


def rank(fleet: Fleet, name: str) -> dict:
    found: dict = fleet.master.overview(fleet.now)["workers"][name]["ranks"][0]
    return found


def see(fleet: Fleet, grant: Grant, **load: int) -> Worker:
    """The prefill worker has the Submit."""
    worker = fleet.workers[grant.worker_id]
    worker.see(grant)
    fleet.report(worker, **load)
    return worker


def prefilling(fleet: Fleet, *names: str) -> None:
    """These decode ranks have prompts of their own for half a second: they take no further one."""
    for name in names:
        fleet.report(fleet.workers[name], prefill_tokens=50_000)


def hand_over(fleet: Fleet, grant: Grant) -> None:
    see(fleet, grant)
    end = Finished(grant.request_id, grant.attempt, "handed_over", 100, 0, 1)
    fleet.report(fleet.workers[grant.worker_id], finished=(end,))


def go_on(fleet: Fleet, grant: Grant, **load: int) -> Grant:
    """The decode worker has the Submit; returns what it runs."""
    assert grant.decode is not None
    place = grant.decode
    later = replace(
        grant,
        worker_id=place.worker_id,
        epoch=place.epoch,
        rank=place.rank,
        number=place.number,
        decode=None,
    )
    fleet.workers[place.worker_id].see(later)
    fleet.report(fleet.workers[place.worker_id], **load)
    return later


def assert_settled(fleet: Fleet) -> None:
    fleet.wait(1.0)
    fleet.master.check()
    assert fleet.master.idle()
    for name in fleet.workers:
        assert rank(fleet, name)["reserved_tokens"] == rank(fleet, name)["charged_tokens"] == 0


# ---------------------------------------------------------------- what is charged, and to whom


def test_both_ranks_are_charged_and_neither_twice():
    fleet = split(1)
    grant = granted(fleet)
    place = Place(WorkerId("d0"), 1, "10.0.0.1:9001", 0, NUMBERS_A_TERM)
    assert (grant.worker_id, grant.decode) == ("p", place)
    assert rank(fleet, "p")["charged_tokens"] == 100
    assert rank(fleet, "p")["reserved_tokens"] == 1, "its first token"
    decode = rank(fleet, "d0")
    assert (decode["charged_tokens"], decode["busy_s"]) == (0, 0.0), "it is no prefill work there"
    assert (decode["reserved_tokens"], decode["headroom"]) == (116, 100_000 - 116)

    see(fleet, grant)
    assert rank(fleet, "p")["charged_tokens"] == 0
    hand_over(fleet, grant)
    assert rank(fleet, "p")["reserved_tokens"] == 0
    assert rank(fleet, "d0")["reserved_tokens"] == 116
    later = go_on(fleet, grant, kv_free=100_000 - 112, running=1)
    assert rank(fleet, "d0")["reserved_tokens"] == 16, "its prompt is in the report now"
    assert rank(fleet, "d0")["headroom"] == 100_000 - 112 - 16
    fleet.finish(later)
    assert_settled(fleet)


def test_a_reservation_grows_with_what_its_request_has_put_there():
    """Expected lengths are near enough geometric: what is left is what was expected at first."""
    fleet = split(1)
    grant = granted(fleet)
    hand_over(fleet, grant)
    before = [go_on(fleet, grant, kv_free=free, running=1) for free in (99_888, 99_000, 90_000)]
    assert rank(fleet, "d0")["headroom"] == 90_000 - 16
    fleet.finish(before[0])
    assert_settled(fleet)


def test_what_the_decode_rank_holds_is_not_reserved_again():
    fleet = split(2)
    tokens = range(160)
    fleet.store(fleet.workers["d1"], hashes_of(tokens))
    fleet.store(fleet.workers["p"], hashes_of(tokens))
    for name in ("d0", "d1"):
        fleet.report(fleet.workers[name], kv_free=100, running=1)
    grant = fleet.grant(fleet.ask(tokens, max_tokens=16))
    assert grant.decode.worker_id == "d1", "144 of its 160 tokens are there: 32 fit"
    assert rank(fleet, "d1")["reserved_tokens"] == 16 + 16


# ---------------------------------------------------------------- which decode rank


def test_the_decode_rank_is_the_one_with_the_least_time_per_token():
    fleet = split(3)
    for name, rows in (("d0", 5), ("d1", 2), ("d2", 3)):
        fleet.report(fleet.workers[name], running=rows, decode_rows=rows, context_tokens=100 * rows)
    grant = granted(fleet)
    assert grant.decode.worker_id == "d1"
    why = fleet.master.placement(grant.request_id)["decode"]
    assert (why["worker_id"], why["rank"], why["why"]) == ("d1", 0, "time")
    assert why["token_s"] == pytest.approx(1e-3 + 1e-4 * 3 + 1e-8 * 300)


def test_a_slow_way_counts_once_an_answer():
    fleet = split(0)
    fleet.add("near", role=Role.DECODE, transports=("sim",))
    fleet.add("far", role=Role.DECODE, transports=("sim",), transfer=SLOW)
    fleet.report(fleet.workers["near"], running=20, decode_rows=20)  # 2 ms more a token
    fleet.report(fleet.workers["far"], running=1, decode_rows=1)
    prefilling(fleet, "near", "far")
    assert granted(fleet, 100, max_tokens=16).decode.worker_id == "near", "101 ms for 16 tokens"
    assert granted(fleet, 20, max_tokens=16).decode.worker_id == "far", "21 ms"


def test_ties_go_to_the_most_headroom():
    fleet = split(2)
    fleet.report(fleet.workers["d0"], kv_free=5_000, running=1)
    fleet.report(fleet.workers["d1"], kv_free=6_000, running=1)
    assert granted(fleet).decode.worker_id == "d1"


def test_a_chat_stays_on_its_decode_rank_while_that_has_headroom():
    fleet = split(2)
    first = granted(fleet, chat_id="c")
    assert first.decode.worker_id == "d0"
    fleet.report(fleet.workers["d0"], running=9, decode_rows=9, kv_free=60_000)
    fleet.report(fleet.workers["d1"], running=1, decode_rows=1)
    prefilling(fleet, "d0", "d1")
    fleet.wait(0.05)
    again = granted(fleet, chat_id="c")
    assert again.decode.worker_id == "d0"
    assert fleet.master.placement(again.request_id)["decode"]["why"] == "chat"
    fleet.report(fleet.workers["d0"], kv_free=50_100)
    fleet.wait(0.05)
    assert granted(fleet, chat_id="c").decode.worker_id == "d1", "no duty"


def test_a_worker_that_failed_the_request_is_not_its_decode_rank():
    fleet = split(2)
    assert granted(fleet, exclude=(WorkerId("d0"),)).decode.worker_id == "d1"


# ---------------------------------------------------------------- headroom and back-pressure


def test_no_headroom_no_grant_and_the_next_report_that_has_some_ends_the_wait():
    fleet = split(2)
    for name in ("d0", "d1"):
        fleet.report(fleet.workers[name], kv_free=110, running=1)
    request = fleet.ask(100, max_tokens=16)
    assert fleet.grant(request) is None
    model = fleet.master.overview(fleet.now)["models"]["m"]
    assert (model["waiting"], model["pairs"]) == (1, True)
    assert model["held_back"] == 1
    fleet.wait(0.5)
    looks = fleet.master.overview(fleet.now)["policy"]["looks"]
    fleet.wait(5.0)
    assert fleet.master.overview(fleet.now)["policy"]["looks"] == looks, "nobody looks in vain"
    fleet.report(fleet.workers["d1"], kv_free=116)
    assert fleet.grant(request).decode.worker_id == "d1"


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_request_that_ends_with_its_first_token_needs_no_decode_rank(max_tokens):
    fleet = split(1)
    fleet.report(fleet.workers["d0"], kv_free=10, running=1)
    grant = granted(fleet, 100, max_tokens=max_tokens)
    assert (grant.worker_id, grant.decode) == ("p", None)
    see(fleet, grant)
    fleet.finish(grant)
    assert_settled(fleet)


def test_reservations_of_one_turn_count_for_each_other():
    """W08: a burst sees its own grants, on the decode ranks as well."""
    fleet = split(4, kv_total=(2_000,))
    for index in range(4):
        fleet.report(fleet.workers[f"d{index}"], kv_free=1_000, running=40)
    asked = [fleet.ask(10, max_tokens=16, tick=False) for _ in range(16)]
    fleet.tick()
    places = [grant.decode.worker_id for grant in map(fleet.grant, asked) if grant]
    assert sorted(places) == [f"d{i}" for i in range(4) for _ in range(4)]


def test_a_prompt_larger_than_any_decode_pool_is_refused_at_once():
    fleet = split(1, kv_total=(64,))
    assert fleet.refusal(fleet.ask(100)).status == 400


def test_every_way_out_of_back_pressure_gives_all_back():
    fleet = split(1, kv_total=(1_000,))
    asked = [fleet.ask(200, max_tokens=16) for _ in range(12)]
    fleet.wait(0.2)
    taken = [request for request in asked if fleet.grant(request)]
    assert 0 < len(taken) < 12
    for request in asked:
        fleet.cancel(request)
    assert_settled(fleet)


# ---------------------------------------------------------------- which way


class LastRank:
    """Of ranks of one role the last one, whatever it holds."""

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        return candidates.rank_ids.astype(np.float64)


def test_nobody_waits_for_a_free_rank_that_the_policy_does_not_want():
    fleet = Fleet(LastRank())
    fleet.add("p0", role=Role.PREFILL, transports=("sim",))
    fleet.add("p1", role=Role.PREFILL, transports=("sim",))
    fleet.add("d", role=Role.DECODE, transports=("sim",))
    prompt = range(2_000)
    for name in ("p0", "d"):
        fleet.store(fleet.workers[name], hashes_of(prompt))
    fleet.report(fleet.workers["d"], running=1, decode_rows=1)
    assert fleet.grant(fleet.ask(prompt)) is not None


def test_a_request_does_not_disturb_decoding_where_a_prefill_rank_will_soon_be_free():
    fleet = split(1)
    fleet.report(fleet.workers["d0"], running=20, decode_rows=20)
    first = granted(fleet, 20_000)  # 0.2 s
    assert first.worker_id == "p"
    second = fleet.ask(2_000)
    assert fleet.grant(second) is None, "in line for p"
    fleet.report(fleet.workers["d0"], running=0, decode_rows=0)
    hand_over(fleet, first)
    assert fleet.grant(second).worker_id == "p"


def test_of_a_backlog_that_is_better_off_in_line_a_round_looks_at_two():
    fleet = split(1)
    fleet.report(fleet.workers["d0"], running=20, decode_rows=20)
    granted(fleet, 20_000)
    waiting = [fleet.ask(2_000) for _ in range(12)]
    looks = fleet.master.placements.num_looks
    fleet.report(fleet.workers["d0"], running=20, decode_rows=20)
    assert fleet.master.placements.num_looks == looks + MOST_IN_LINE
    assert not any(fleet.grant(ask) for ask in waiting)


def test_an_idle_decode_rank_takes_the_prompts_that_would_wait():
    fleet = split(2)
    granted(fleet, 20_000)
    second = granted(fleet, 2_000)
    assert (second.worker_id, second.decode) == ("d1", None), "nothing is coming there"
    assert rank(fleet, "d1")["charged_tokens"] == 2_000


def test_a_fused_rank_competes():
    fleet = split(1)
    fleet.add("f", role=Role.FUSION)
    assert granted(fleet, 1_000).worker_id == "p", "as good, and made for it"
    assert granted(fleet, 1_000).worker_id == "f", "at once"
    fleet.report(fleet.workers["f"], running=4, decode_rows=4)
    third = fleet.ask(1_000)
    assert fleet.grant(third) is None or fleet.grant(third).worker_id != "f"


@pytest.mark.parametrize(
    ("transports", "pairs"), [(("sim",), True), (("a", "sim"), True), (("a",), False), ((), False)]
)
def test_p13_ranks_pair_by_a_transport_that_both_have(transports, pairs):
    fleet = split(0)
    fleet.add("d", role=Role.DECODE, transports=transports)
    grant = granted(fleet)
    assert (grant.worker_id, grant.decode is not None) == (("p", True) if pairs else ("d", False))


def test_each_prefill_rank_is_given_a_decode_rank_it_can_reach():
    fleet = Fleet()
    for name in ("x", "y"):
        fleet.add(f"p{name}", role=Role.PREFILL, transports=(name,))
        fleet.add(f"d{name}", role=Role.DECODE, transports=(name,))
    seen = set()
    for _ in range(8):
        grant = fleet.grant(fleet.ask(100))
        if grant is not None and grant.decode is not None:
            seen.add((grant.worker_id, grant.decode.worker_id))
        fleet.wait(0.3)
    assert seen <= {("px", "dx"), ("py", "dy")}
    assert len(seen) == 2


def test_another_format_is_refused_at_registration():
    """Case P13."""
    fleet = split(1)
    fleet.add("odd", join=False, role=Role.DECODE, transports=("sim",), kv_format="int8")
    assert fleet.state("odd") == "refused"


# ---------------------------------------------------------------- every end, in every phase


def before(fleet: Fleet, grant: Grant) -> Grant:
    return grant


def submitted(fleet: Fleet, grant: Grant) -> Grant:
    see(fleet, grant)
    return grant


def handed_over(fleet: Fleet, grant: Grant) -> Grant:
    hand_over(fleet, grant)
    return grant


def decoding(fleet: Fleet, grant: Grant) -> Grant:
    hand_over(fleet, grant)
    return go_on(fleet, grant)


def told_late(fleet: Fleet, grant: Grant) -> Grant:
    """The decode worker has it, and its report comes before that of the prefill worker."""
    see(fleet, grant)
    return go_on(fleet, grant)


PHASES = [before, submitted, handed_over, decoding, told_late]


def cancelled(fleet: Fleet, grant: Grant) -> None:
    fleet.cancel(grant.request_id)


def asked_anew(fleet: Fleet, grant: Grant) -> None:
    fleet.ask(request_id=grant.request_id, attempt=2, failed=True)
    fleet.cancel(grant.request_id, attempt=2)


def prefill_lost(fleet: Fleet, grant: Grant) -> None:
    """Where the decode worker has the request, it just goes on to its end."""
    del fleet.workers["p"]
    fleet.wait(4.0)
    if fleet.master.booked(grant.request_id) is not None:
        end = Finished(grant.request_id, 1, "done", 100, 20, 16)
        fleet.report(fleet.workers["d0"], finished=(end,))


def decode_lost(fleet: Fleet, grant: Grant) -> None:
    """The frontend asks anew when it hears of it, or of the hand-over."""
    del fleet.workers["d0"]
    fleet.wait(4.0)
    fleet.cancel(grant.request_id)


def frontend_silent(fleet: Fleet, grant: Grant) -> None:
    """Nobody submits; workers that have it end it themselves."""
    fleet.wait(EXPIRY_S + 0.1)
    for name in ("p", "d0"):
        end = Finished(grant.request_id, 1, "cancelled", 100, 0, 0)
        fleet.report(fleet.workers[name], finished=(end,))


def decode_done(fleet: Fleet, grant: Grant) -> None:
    """Its last word comes before the prefill worker's only one."""
    if grant.decode is not None:
        see(fleet, grant)
    end = Finished(grant.request_id, 1, "done", 100, 20, 16)
    fleet.tell(From("d0", Now(WorkerId("d0"), 1, (), (end,))))
    late = Finished(grant.request_id, 1, "handed_over", 100, 0, 1)
    fleet.report(fleet.workers["p"], finished=(late,))
    if grant.decode is not None:
        go_on(fleet, grant)


def decode_preempts(fleet: Fleet, grant: Grant) -> None:
    if grant.decode is not None:
        see(fleet, grant)
        go_on(fleet, grant)
    end = Finished(grant.request_id, 1, "rejected", 100, 0, 4)
    fleet.report(fleet.workers["d0"], finished=(end,))
    fleet.ask(request_id=grant.request_id, attempt=2, failed=True)
    fleet.cancel(grant.request_id, attempt=2)


ENDS = [
    cancelled,
    asked_anew,
    prefill_lost,
    decode_lost,
    frontend_silent,
    decode_done,
    decode_preempts,
]


@pytest.mark.parametrize(("phase", "end"), list(product(PHASES, ENDS)))
def test_a_split_request_is_settled_once_however_and_whenever_it_ends(phase, end):
    fleet = split(1)
    grant = granted(fleet)
    end(fleet, phase(fleet, grant))
    assert_settled(fleet)
    for command in fleet.out:
        if isinstance(command, Send) and isinstance(command.message, Fence):
            fenced(fleet, command.peer, command.message)
    for name, worker in fleet.workers.items():
        row = int(fleet.master.fleet.members.get(WorkerId(name)).rows[0])
        given = range(NUMBERS_A_TERM, int(fleet.master.ranks.next_number[row]))
        missing = [number for number in given if not worker.has_seen(0, number)]
        assert not missing, f"numbers that {name} will never count past"


def fenced(fleet: Fleet, name: str, fence: Fence) -> None:
    """The worker counts its number."""
    if name in fleet.workers:
        worker = fleet.workers[name]
        worker.see(Grant(fence.request_id, 1, fence.number, worker.id, 1, "", fence.rank, 0, 0.0))


@pytest.mark.parametrize("reason", ["done", "cancelled", "failed", "rejected"])
def test_a_request_that_ends_where_it_began_frees_its_reservation(reason):
    """Its number on the decode rank is fenced, or no Status could count past it: at once, or where
    no choice can have gone on there, with the next Poll."""
    fleet = split(1)
    grant = granted(fleet)
    see(fleet, grant)
    end = Finished(grant.request_id, 1, reason, 100, 0, 1)
    out = fleet.report(fleet.workers["p"], finished=(end,))
    if reason == "done":
        assert not fleet.sent(Fence, out)
        out = fleet.report(fleet.workers["d0"])
    assert Fence(grant.request_id, 1, 0, grant.decode.number) in fleet.sent(Fence, out)
    assert_settled(fleet)


def test_a_prefill_worker_lost_after_the_hand_over_costs_the_request_nothing():
    """Nobody has told the Master of it yet: the decode rank's Status does."""
    fleet = split(1)
    grant = granted(fleet)
    see(fleet, grant)
    later = go_on(fleet, grant)
    del fleet.workers["p"]
    out = fleet.wait(4.0)
    assert fleet.sent(WorkerLost, out)
    assert not fleet.sent(Fence, out)
    assert fleet.master.booked(grant.request_id) is not None
    fleet.finish(later)
    assert_settled(fleet)


def test_a_hand_over_that_nobody_follows_is_fenced():
    fleet = split(1)
    grant = granted(fleet)
    hand_over(fleet, grant)
    out = fleet.wait(EXPIRY_S + 0.01)
    assert fleet.sent(Fence, out) == [Fence(grant.request_id, 1, 0, grant.decode.number)]
    assert_settled(fleet)


def test_a_router_only_caller_gets_both_ranks_and_gives_both_back():
    fleet = split(1)
    request = fleet.ask(100, lease_s=5.0)
    grant = fleet.grant(request)
    assert (grant.worker_id, grant.decode.worker_id) == ("p", "d0")
    assert rank(fleet, "d0")["reserved_tokens"] == 116
    fleet.wait(0.5)
    assert rank(fleet, "d0")["reserved_tokens"] == 116
    fleet.wait(5.0)
    assert_settled(fleet)


def test_lengths_are_learned_from_whole_answers():
    """One token comes from the prefill rank, the others from the decode rank."""
    fleet = split(1)
    for _ in range(300):
        grant = granted(fleet, 20, max_tokens=1000)
        hand_over(fleet, grant)
        fleet.finish(go_on(fleet, grant), generated=39)
        fleet.wait(0.02)
    model = fleet.master.overview(fleet.now)["models"]["m"]
    assert model["expected_output_tokens"] == pytest.approx(40, abs=1)


def test_many_numbers_that_nobody_follows_are_told_together_before_the_rank_runs_out_of_them():
    fleet = split(1)
    fences = []
    for _ in range(100):
        grant = granted(fleet)
        see(fleet, grant)
        end = Finished(grant.request_id, 1, "done", 100, 0, 1)
        found = fleet.sent(Fence, fleet.report(fleet.workers["p"], finished=(end,)))
        assert len(found) in (0, MOST_OWED)
        for fence in found:
            fenced(fleet, "d0", fence)
        fences += found
        if found:
            fleet.report(fleet.workers["d0"])
    numbers = range(NUMBERS_A_TERM, NUMBERS_A_TERM + len(fences))
    assert [fence.number for fence in fences] == [*numbers]
    assert len(fences) == 100 // MOST_OWED * MOST_OWED


def test_who_is_better_off_in_line_of_one_model_ends_no_round_of_another():
    fleet = split(1)
    fleet.report(fleet.workers["d0"], running=20, decode_rows=20)
    granted(fleet, 20_000)
    for _ in range(5):  # three are held for p
        fleet.ask(2_000)
    assert fleet.master.placements.better_in_line
    other = Fleet()
    worker = other.add("w")
    other.master.placements.better_in_line = True  # as another model of its Master left it
    looks = other.master.placements.num_looks
    for _ in range(4):
        assert other.grant(other.ask(100, exclude=(worker.register.worker_id,))) is None
    assert other.master.placements.num_looks == looks + 1 + 2 + 3 + 4

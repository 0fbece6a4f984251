"""Requests split between prefill and decode workers, in virtual time, from the client's side: the
same tokens as from one worker, whoever dies, and everything given back."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from rtp.core.commands import Pull, Send
from rtp.core.messages import Grant, Submit
from rtp.core.outcomes import Outcome
from rtp.core.types import Role, SamplingParams, WorkerId
from tests.support.cluster import Cluster, Planned, a_cluster, a_request, random_tokens

P, D, F = Role.PREFILL, Role.DECODE, Role.FUSION
AT_ONCE = (0.0, 0.0)
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=9)
FAST = {"a": 0.001, "b": 1e-4, "c": 0.0, "d": 0.005, "e": 1e-4, "f": 0.0}


def split(*, told: tuple[float, float] | None = None, **options: Any) -> Cluster:
    """Three workers: w0 prefills, w1 and w2 decode. told: what the Master hears of the transport,
    if not the truth."""
    options = {
        "workers": 3, "roles": (P, D, D), "runner": FAST, "transfer": (0.0, 1e9)
    } | options  # fmt: skip
    register = {
        "profile": tuple(options["runner"][name] for name in "abcdef"),
        "transfer": told or options["transfer"],
    }
    return a_cluster(**options, register=register)


def prompt(length: int = 200, seed: int = 1) -> tuple[int, ...]:
    return random_tokens(Random(seed), length)


def right(planned: Planned) -> list[int]:
    """What one worker alone answers."""
    return a_cluster(workers=1, runner=FAST).run(planned).ids


def pulls(cluster: Cluster) -> list[Pull]:
    return [command for _, _, command in cluster.commands if isinstance(command, Pull)]


def submits(cluster: Cluster) -> list[tuple[str, Submit]]:
    return [
        (c.peer, c.message)
        for _, _, c in cluster.commands
        if isinstance(c, Send) and isinstance(c.message, Submit)
    ]


def places(outcome: Outcome) -> list[tuple[str, str | None]]:
    """Of each grant: where it begins, where it goes on."""
    return [
        (grant.worker_id, grant.decode.worker_id if grant.decode else None)
        for _, grant in outcome.grants
    ]


def assert_quiet(cluster: Cluster) -> None:
    """Every reservation, pin and page is given back."""
    cluster.pass_time(12.0)
    cluster.master.check()
    assert cluster.master.idle()
    for process in cluster.world.workers.values():
        if process.alive:
            process.core.check()
            assert process.core.idle()
    assert cluster.frontend.idle()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_a_split_answer_is_the_answer_of_one_worker(n, steps_in_flight):
    planned = a_request(tokens=prompt(), sampling=SAMPLED, n=n)
    alone = a_cluster(workers=1, runner=FAST).run(planned)
    cluster = split(worker={"steps_in_flight": steps_in_flight})
    outcome = cluster.run(planned)
    assert places(outcome) == [("w0", "w1")]
    assert [peer for peer, _ in submits(cluster)] == ["w0", "w1"]
    assert {i: c.ids for i, c in outcome.choices.items()} == {
        i: c.ids for i, c in alone.choices.items()
    }
    assert outcome.ended == alone.ended
    assert [(p.start, p.num_tokens) for p in pulls(cluster)] == [(0, 192)]
    decode = cluster.workers[WorkerId("w1")].stats
    assert decode.computed_tokens < n * (8 + 20 + 2), "the prompt is not computed twice"
    assert cluster.master.totals.handovers == 1
    assert_quiet(cluster)


def test_the_first_token_does_not_wait_for_the_transfer():
    cluster = split(transfer=(0.5, 1e9), told=AT_ONCE)
    outcome = cluster.run(a_request(tokens=prompt(), max_tokens=4))
    assert outcome.first_token_at - outcome.begun_at < 0.1
    assert outcome.ended_at - outcome.begun_at > 0.5
    assert places(outcome) == [("w0", "w1")]


def test_a_chat_returns_to_its_prefix_and_to_its_decode_rank():
    """What the decode rank has of the last turn is not brought again."""
    cluster = split()
    earlier = cluster.run(a_request(tokens=prompt(), max_tokens=24, chat_id="c"))
    turn = (*prompt(), *earlier.ids, *prompt(40, seed=2))
    cluster.pass_time(0.5)
    others = [a_request(tokens=prompt(64, seed=i), max_tokens=64, at=cluster.now) for i in (3, 4)]
    busy = [cluster.begin(other) for other in others]
    second = cluster.run(a_request(tokens=turn, max_tokens=8, chat_id="c", at=cluster.now + 0.1))
    assert places(earlier) == places(second) == [("w0", "w1")]
    assert {then or first for o in busy for first, then in places(o)} == {"w1", "w2"}
    last = pulls(cluster)[-1]
    assert last.start == (200 + 24 - 1) // 16 * 16
    reasons = cluster.master.placement(second.request_id)
    assert reasons["decode"]["worker_id"] == "w1"
    assert reasons["decode"]["why"] == "chat"
    assert reasons["decode"]["transfer_tokens"] == len(turn) - last.start


def test_decode_ranks_share_the_load_by_predicted_time():
    cluster = split()
    planned = [a_request(tokens=prompt(64, seed=i), max_tokens=64, at=0.02 * i) for i in range(8)]
    outcomes = cluster.run_all(planned)
    taken = [places(outcome)[0][1] for outcome in outcomes]
    assert taken.count("w1") == taken.count("w2") == 4
    for one, outcome in zip(planned, outcomes, strict=True):
        assert outcome.ids == right(one)
    assert_quiet(cluster)


@pytest.mark.parametrize("when", ["prefill", "pull", "decode"])
@pytest.mark.parametrize("who", ["w0", "w1"])
def test_whoever_dies_the_answer_goes_on(who, when):
    """Cases P10, P12: once, and with the same tokens."""
    runner = FAST | {"b": 5e-4}  # 100 ms of prefill
    cluster = split(transfer=(0.1, 1e9), told=AT_ONCE, runner=runner)
    planned = a_request(tokens=prompt(), sampling=SAMPLED)
    outcome = cluster.begin(planned)
    at, had = {"prefill": (0.05, 0), "pull": (0.17, 1), "decode": (0.25, 3)}[when]
    cluster.pass_time(at)
    assert len(outcome.choices[0].ids if outcome.choices else ()) >= had
    assert when != "pull" or len(outcome.choices[0].ids) == 1
    cluster.world.kill(cluster.world.workers[WorkerId(who)])
    cluster.pass_time(0.01)
    cluster.start_worker(WorkerId(who), epoch=2, role=P if who == "w0" else D)
    cluster.world.run_while(lambda: not outcome.over, 60.0)
    assert outcome.ended is not None, outcome.failed
    assert outcome.ids == right(planned)
    moves = {("w0", "prefill"): 1, ("w1", "pull"): 1, ("w1", "decode"): 1, ("w1", "prefill"): 1}
    assert cluster.frontend.counters.replacements == moves.get((who, when), 0)
    if (who, when) == ("w0", "pull"):
        assert cluster.workers[WorkerId("w1")].stats.pulls_failed == 1
    assert_quiet(cluster)


def test_p10_a_transfer_that_stalls_is_recomputed_in_time():
    """Cases P02, P10."""
    cluster = split(transfer=(60.0, 1e9), told=AT_ONCE)
    planned = a_request(tokens=prompt(), sampling=SAMPLED)
    outcome = cluster.run(planned)
    assert outcome.ids == right(planned)
    assert cluster.workers[WorkerId("w1")].stats.pulls_failed == 1
    assert 5.0 < outcome.ended_at - outcome.begun_at < 7.0
    assert_quiet(cluster)


def test_a_client_that_leaves_at_any_moment_leaves_nothing():
    cluster = split(transfer=(0.02, 1e9), told=AT_ONCE, runner=FAST | {"b": 2e-4})
    draw = Random(5)
    for number in range(60):
        at = number * 0.05
        planned = a_request(tokens=prompt(160, seed=number % 7), max_tokens=12, at=at)
        cluster.leave(cluster.begin(planned), at + draw.random() * 0.15)
    cluster.pass_time(4.0)
    assert_quiet(cluster)


def test_without_a_common_transport_there_is_no_pair():
    """Case P13: found when workers are paired, not when pages are moved."""
    for ways in (("sim",), ("other",), ()):
        cluster = split(workers=1, roles=(D,))
        cluster.start_worker(WorkerId("p"), role=P, transports=ways)
        cluster.pass_time(1.0)
        outcome = cluster.run(a_request(tokens=prompt(), max_tokens=4, at=cluster.now))
        assert places(outcome) == ([("p", "w0")] if ways == ("sim",) else [("w0", None)])


def test_p01_a_prompt_no_worker_can_take_starts_nowhere():
    """Case P01: refused at the gate; no decode rank is reserved for it."""
    cluster = split(runner=FAST | {"max_model_len": 256})
    outcome = cluster.run(a_request(tokens=prompt(256), max_tokens=1))
    assert outcome.failed.status == 400
    assert not outcome.grants
    assert_quiet(cluster)


def test_prefill_workers_alone_serve_nobody():
    cluster = split(workers=2, roles=(P,))
    outcome = cluster.run(a_request(tokens=prompt(), max_tokens=4))
    assert outcome.failed.status == 503


def test_a_slow_transport_does_not_make_things_worse():
    """A transfer that takes longer than the prefill it saves: the decode rank computes it."""
    cluster = split(transfer=(1.0, 1e9))
    outcome = cluster.run(a_request(tokens=prompt(), max_tokens=4))
    assert places(outcome) == [("w1", None)]


def test_a_fused_rank_takes_what_it_does_better():
    """Idle, it needs no transfer; busy with rows that a prefill would hold up, it is spared."""
    cluster = split(roles=(P, D, F), transfer=(0.03, 1e9))
    first = cluster.begin(a_request(tokens=prompt(), max_tokens=400))
    cluster.pass_time(0.5)
    others = [
        cluster.begin(a_request(tokens=prompt(256, seed=i), max_tokens=400, at=cluster.now))
        for i in range(2, 6)
    ]
    cluster.pass_time(0.5)
    assert places(first) == [("w2", None)]
    assert ("w0", "w1") in [place for outcome in others for place in places(outcome)]
    assert any(isinstance(c.message, Grant) for _, _, c in cluster.commands if isinstance(c, Send))


def test_requests_wait_for_headroom_and_go_on_when_it_returns():
    """Back-pressure: no decode rank can hold them, so they wait in the Master, not in a worker."""
    cluster = split(
        workers=2,
        roles=(P, D),
        runner=FAST | {"num_blocks": 40},  # 640 tokens
        worker={"max_rows": 8},
    )
    planned = [a_request(tokens=prompt(160, seed=i), max_tokens=100) for i in range(6)]
    outcomes = [cluster.begin(one) for one in planned]
    cluster.pass_time(0.3)
    overview = cluster.master.overview(cluster.world.now)
    model = overview["models"]["sim"]
    assert sum(bool(outcome.grants) for outcome in outcomes) == 2, "160 + 100 twice"
    assert model["waiting"] == 4
    assert model["held_back"] > 0
    looks = overview["policy"]["looks"]
    cluster.world.run_while(lambda: not all(outcome.over for outcome in outcomes), 60.0)
    for one, outcome in zip(planned, outcomes, strict=True):
        assert outcome.ids == right(one)
    assert cluster.workers[WorkerId("w1")].stats.preemptions == 0
    assert cluster.master.overview(cluster.world.now)["policy"]["looks"] < looks + 40
    assert_quiet(cluster)


def test_what_a_decode_rank_preempts_is_placed_anew():
    """Expected lengths were wrong: the Master finds another rank, the tokens stay the same."""
    cluster = split(runner=FAST | {"num_blocks": 40})
    for member in cluster.master.fleet.pools.values():
        for _ in range(200):
            member.outputs.observe("", 1.0)  # whoever comes is expected to be short
    planned = [a_request(tokens=prompt(96, seed=i), max_tokens=250, at=0.01 * i) for i in range(5)]
    outcomes = cluster.run_all(planned)
    preempted = sum(worker.stats.preemptions for worker in cluster.workers.values())
    assert preempted > 0
    for one, outcome in zip(planned, outcomes, strict=True):
        assert outcome.ids == right(one)
    assert_quiet(cluster)

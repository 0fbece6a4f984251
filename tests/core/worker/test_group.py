"""Ranks that step together: one step number, one begin, dummies, rounds, one end."""

from __future__ import annotations

import random
from itertools import groupby
from typing import Any

import pytest

from rtp.core.events import From, MasterUp, RunnerFailed
from rtp.core.messages import Cancel, Fence
from rtp.core.steps import StepPlan
from rtp.core.types import RequestId
from rtp.core.worker.group import GATHER_S, Gathering
from tests.core.worker.rig import Rig

BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])


def a_group(ranks: int = 3, **params: Any) -> Rig:
    return Rig(ranks=ranks, lockstep=True, **params)


def group_steps(rig: Rig) -> list[list[tuple[float, int, StepPlan]]]:
    """What was run, by step number: (begin, rank, plan) of every rank."""
    return [list(step) for _, step in groupby(rig.steps, key=lambda each: each[2].step)]


@BOTH
def test_a_group_step_begins_on_all_ranks_at_once_when_the_slowest_is_done(steps_in_flight):
    rig = a_group(steps_in_flight=steps_in_flight)
    submits = [rig.submit("long", range(100), 12, rank=0), rig.submit("short", range(3), 6, rank=1)]
    rig.run()
    rig.assert_right(*submits)
    steps = group_steps(rig)
    assert [step[0][2].step for step in steps] == list(range(len(steps)))
    for step in steps:
        assert [rank for _, rank, _ in step] == [0, 1, 2]
        assert len({begin for begin, _, _ in step}) == 1
        assert any(not plan.dummy for _, _, plan in step), "a step of dummies alone"
    ends = [rig._step_ends[number] for number in range(len(steps))]
    assert all(step[0][0] >= end for step, end in zip(steps[1:], ends, strict=False))
    rig.assert_quiet()


@BOTH
def test_ranks_without_work_run_dummies_and_an_idle_group_rests(steps_in_flight):
    rig = a_group(steps_in_flight=steps_in_flight)
    submit = rig.submit("only", range(5), 4, rank=1)
    rig.run()
    rig.assert_right(submit)
    num_steps = len(group_steps(rig))
    plans = {rank: [plan for _, at, plan in rig.steps if at == rank] for rank in range(3)}
    assert all(plan.dummy and not plan.rows for rank in (0, 2) for plan in plans[rank])
    assert not any(plan.dummy for plan in plans[1])
    assert rig.worker.stats.dummy_steps == 2 * num_steps
    rig.run(5.0)
    assert len(group_steps(rig)) == num_steps, "nobody has work"


def test_a_rank_alone_or_independent_runs_no_dummies():
    for ranks, lockstep in ((1, True), (3, False)):
        rig = Rig(ranks=ranks, lockstep=lockstep)
        submit = rig.submit("only", range(5), 4)
        rig.run()
        rig.assert_right(submit)
        assert rig.worker.stats.dummy_steps == 0


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_outputs_do_not_depend_on_who_steps_along(steps_in_flight, seed):
    """Shared prefixes, small pools, preemption, cancelled requests."""
    draw = random.Random(seed)
    rig = a_group(
        steps_in_flight=steps_in_flight,
        max_batch_tokens=32,
        chunk_while_decoding=8,
        sim_params={"num_blocks": 24, "eos_every": 20},
    )
    submits = []
    for number in range(24):
        prompt = [*range(draw.choice([0, 8, 21])), *(draw.randrange(1000) for _ in range(9))]
        submits.append(
            rig.submit(
                f"r{number}", prompt, draw.randint(1, 30), rank=draw.randrange(3),
                temperature=draw.choice([0.0, 1.0]), seed=number,
            )
        )  # fmt: skip
        rig.run(draw.random() * 0.2)
        if draw.random() < 0.2:
            rig.cancel(submits.pop().request_id)
    rig.run()
    refused = {r.request_id for r in rig.rejected}
    assert all(r.reason == "preempted" for r in rig.rejected)
    rig.assert_right(*(s for s in submits if s.request_id not in refused))
    rig.assert_quiet()


def test_a_prompt_is_cut_short_while_any_rank_of_the_group_decodes():
    """Or the decode of one rank would wait for the long chunk of another."""
    rig = a_group(ranks=2, max_batch_tokens=64, chunk_while_decoding=8)
    rig.submit("decodes", range(4), 30, rank=0)
    rig.run(until=lambda: len(rig.outputs["decodes", 0, 0]) >= 2)
    rig.submit("long", range(100, 200), 4, rank=1)
    rig.run(until=lambda: "decodes" in {key[0] for key in rig.finishes})
    chunks = [row.num_new for _, rank, plan in rig.steps if rank == 1 for row in plan.rows]
    assert max(chunks) == 8
    rig.submit("later", range(300, 400), 4, rank=0)
    rig.run()
    both = [
        [sum(row.num_new for row in plan.rows) for _, _, plan in step] for step in group_steps(rig)
    ]
    assert max(map(max, both)) == 64, "with no decode anywhere chunks are whole"


def test_the_wait_for_the_slowest_is_counted():
    cost = {"a": 0.5, "b": 0.01, "c": 0.0, "d": 0.25, "e": 0.0, "f": 0.0}
    rig = a_group(ranks=2, sim_params=cost)
    rig.submit("one", range(50), 1, rank=0)
    rig.run()
    stats = rig.worker.stats
    # One step: 1 s of prefill beside a dummy of 0.25 s.
    assert (stats.group_steps, stats.dummy_steps) == (1, 1)
    assert stats.group_step_s == pytest.approx(2.0)
    assert stats.group_wait_s == pytest.approx(0.75)
    assert rig.worker.overview()["group_wait_share"] == pytest.approx(0.375)
    rig.run(1.0)
    assert rig.master.statuses[-1].group == stats.group_cost()


# ---------------------------------------------------------------- rounds of grants


def starts(rig: Rig, request_id: str) -> float:
    """When the first step with a row of this request began."""
    prompts = {s.prompt: s for s in rig.submitted if s.request_id == request_id}
    return next(
        begin for begin, _, plan in rig.steps for start in plan.started if start.prompt in prompts
    )


def test_submits_of_one_round_start_in_one_step():
    rig = a_group()
    for rank in range(3):
        rig.submit(f"r{rank}", range(rank * 100, rank * 100 + 20), 2, rank=rank, group=(5, 3))
        assert not rig.steps or rank == 2
        rig.run(0.0005)
    assert {starts(rig, f"r{rank}") for rank in range(3)} == {rig.steps[0][0]}
    assert rig.steps[0][0] < 1.0 + GATHER_S


def test_a_round_is_waited_for_no_longer_than_the_bound_and_once():
    rig = a_group()
    rig.submit("early", range(20), 2, rank=0, group=(5, 3))
    rig.run(GATHER_S / 2)
    assert not rig.steps
    rig.run(GATHER_S)
    assert starts(rig, "early") == pytest.approx(1.0 + GATHER_S)
    rig.run()
    at = rig.now
    rig.submit("late", range(50, 70), 2, rank=1, group=(5, 3))
    rig.run()
    assert starts(rig, "late") == at


@pytest.mark.parametrize(
    "event",
    [
        From("master", Fence(RequestId("lost"), 0, 1, 0)),
        From("f", Cancel(RequestId("lost"), 0, "client")),
        MasterUp(2),
    ],
    ids=["fenced", "cancelled", "another Master"],
)
def test_nobody_waits_for_one_that_will_not_come(event):
    rig = a_group()
    rig.submit("here", range(20), 2, rank=0, group=(5, 2))
    assert not rig.steps
    rig.tell(event)
    assert starts(rig, "here") == rig.now


def test_a_refused_submit_is_not_missing():
    rig = a_group()
    rig.submit("here", range(20), 2, rank=0, group=(5, 2))
    rig.submit("too long", range(300), 2, rank=1, group=(5, 2))
    assert [r.request_id for r in rig.rejected] == ["too long"]
    assert starts(rig, "here") == rig.now


def test_rounds_are_told_apart():
    gathering = Gathering()
    gathering.arrived(1, 2, 0.0)
    gathering.arrived(2, 2, 0.001)
    gathering.arrived(1, 2, 0.002)
    assert gathering.waits(0.002)
    assert gathering.next_deadline() == 0.001 + GATHER_S
    gathering.arrived(1, 2, 0.0025)  # a third of two: repeated under another attempt
    assert gathering.waits(0.0025)
    assert not gathering.waits(0.001 + GATHER_S)
    assert gathering.next_deadline() is None


def test_a_round_gathers_while_a_step_is_in_flight():
    rig = a_group()
    rig.submit("running", range(20), 8, rank=0)
    rig.submit("here", range(50, 60), 2, rank=1, group=(5, 2))
    rig.run()
    first, second = group_steps(rig)[:2]
    assert first[0][0] + GATHER_S < second[0][0] == rig._step_ends[0]
    assert starts(rig, "here") == second[0][0]


# ---------------------------------------------------------------- the end


def test_a_rank_takes_its_group_down_and_others_only_themselves():
    for lockstep, lost in ((True, [0, 1, 2]), (False, [1])):
        rig = Rig(ranks=3, lockstep=lockstep)
        for rank in range(3):
            rig.submit(f"r{rank}", range(rank * 50, rank * 50 + 20), 40, rank=rank)
        rig.run(0.05)
        rig.tell(RunnerFailed(1, "ended with -9"))
        note = next(note for note in rig.notes if note.event == "runner.failed")
        assert note.fields == {"rank": 1, "reason": "ended with -9", "lost_ranks": lost}
        assert sorted(r.request_id for r in rig.rejected) == [f"r{rank}" for rank in lost]
        assert all((r.reason, r.retry) == ("shutdown", True) for r in rig.rejected)
        rig.submit("again", range(9), 2, rank=0, attempt=1)
        again = [r for r in rig.rejected if r.request_id == "again"]
        assert bool(again) == lockstep

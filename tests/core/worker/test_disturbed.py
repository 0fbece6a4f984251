"""Everything at once, seeded: cancels, fences, repeats, stops, lost frames, links that flap."""

from __future__ import annotations

import random

import pytest

from rtp.core.events import From, FrontendDown, FrontendUp, MasterDown, MasterUp, RunnerFailed
from rtp.core.messages import Ack, AckItem, Delta, Fence, Now, Snapshot, Status, Submit, Tokens
from tests.core.worker.rig import F, Rig


@pytest.mark.parametrize("seed", range(12))
def test_every_attempt_ends_once_and_nothing_stays_behind(seed):
    """What finishes is right, what ends is told once, and when quiet all blocks are back and the
    Master's view is the truth. The rig checks every plan and, after every event, every table."""
    draw = random.Random(seed)
    rig = Rig(
        ranks=draw.choice([1, 2]),
        steps_in_flight=draw.choice([1, 2]),
        max_batch_tokens=draw.choice([8, 64]),
        chunk_while_decoding=draw.choice([4, 16]),
        max_rows=draw.choice([4, 32]),
        max_unacked=draw.choice([6, 1024]),
        sim_params={
            "num_blocks": draw.choice([20, 40, 100]),
            "eos_every": draw.choice([0, 15]),
            "nonfinite_token": 31_999,
        },
    )
    loss = draw.choice([0.0, 0.2])
    reports = (Status, Now, Delta, Snapshot)
    rig.lose = lambda message: isinstance(message, reports) and draw.random() < loss
    submits: list[Submit] = []
    excused = set()  # ended by the test itself, perhaps after its last token was computed
    gone = False
    for number in range(50):
        action = draw.choice(["submit"] * 6 + ["cancel", "fence", "again", "next", "stop", "flap"])
        if action == "submit" or not submits:
            prompt = [*range(draw.choice([0, 9, 24])), *draw.choices(range(50), k=12)]
            if draw.random() < 0.05:
                prompt.append(31_999)
            rank = draw.randrange(len(rig.runners))
            submits.append(
                rig.submit(
                    f"r{number}",
                    prompt,
                    draw.randint(0, 25),
                    n=draw.choice([1, 1, 2]),
                    rank=rank,
                    temperature=draw.choice([0.0, 1.0]),
                    deadline_s=draw.choice([600.0, 600.0, 0.5]),
                    seed=number,
                )
            )
        else:
            old = draw.choice(submits)
            rid, attempt = old.request_id, old.attempt
            excused |= {rid} if action in ("cancel", "fence", "next", "stop") else set()
            if action == "cancel":
                rig.cancel(rid, attempt)
            elif action == "fence":
                rig.tell(From("master", Fence(rid, attempt, old.rank, old.number)))
            elif action == "again":
                rig.tell(From(F, old))
            elif action == "next":
                outputs = {s.choice: rig.outputs[rid, attempt, s.choice] for s in old.choices}
                params = {"temperature": old.sampling.temperature, "seed": old.sampling.seed}
                if not any(out[-1:] == [2] for out in outputs.values()):
                    prompt = memoryview(old.prompt).cast("i").tolist()
                    max_tokens, n = old.sampling.max_tokens, len(old.choices)
                    submits.append(
                        rig.submit(
                            rid, prompt, max_tokens, attempt=attempt + 1, rank=old.rank, n=n,
                            outputs=outputs, **params,
                        )
                    )  # fmt: skip
            elif action == "stop":
                index = len(rig.outputs[rid, attempt, 0])
                rig.tell(From(F, Ack((AckItem(rid, attempt, 0, index, stop=True),))))
            elif action == "flap":
                gone |= flap(rig, draw)
        rig.run(draw.random() * 0.1)
    rig.lose = lambda message: False
    rig.run(5.0)
    rig.tell(FrontendUp(F))
    rig.run(40.0)
    rig.assert_quiet()
    for submit in submits:
        end = rig.master.ends[submit.request_id, submit.attempt]
        for state in submit.choices:
            key = (submit.request_id, submit.attempt, state.choice)
            want = rig.expected(submit, state.choice, memoryview(state.output).cast("i"))
            got = rig.outputs[key]
            assert got == want[: len(got)], key
            if rig.finishes.get(key) in ("stop", "length"):
                assert got == want
            elif end.reason == "done":
                assert gone or submit.deadline_s < 1 or submit.request_id in excused


def flap(rig: Rig, draw: random.Random) -> bool:
    """A connection closes, loses what was on it, and opens again. Whether a frontend was gone for
    so long that its requests were given up."""
    if draw.random() < 0.5:
        rig.tell(MasterDown())
        rig.run(draw.random())
        rig.master.term += draw.choice([0, 1])
        rig.master.version = rig.master.acked_seq = -1
        rig.tell(MasterUp(rig.master.term))
        rig.tell(From("master", rig.master.poll()))
        return False
    lose = rig.lose
    rig.lose = lambda message: isinstance(message, Tokens)
    rig.run(0.03)
    rig.tell(FrontendDown(F))
    rig.lose = lose
    away_s = draw.choice([0.1, 5.0, 11.0])
    rig.run(away_s)
    rig.tell(FrontendUp(F))
    return away_s > 10


@pytest.mark.parametrize("seed", range(4))
def test_a_runner_that_fails_at_any_time_leaves_nothing_behind(seed):
    draw = random.Random(seed)
    rig = Rig(ranks=2, steps_in_flight=2, max_batch_tokens=16)
    kept = []
    for number in range(12):
        submit = rig.submit(f"r{number}", range(number, number + 30), 12, rank=number % 2)
        kept += [submit] if number % 2 else []
        rig.run(draw.random() * 0.05)
    rig.tell(RunnerFailed(0, "killed"))
    rig.run()
    rig.assert_right(*kept)
    rig.assert_quiet()
    assert len(rig.master.ends) == 12

"""Worker: attempts, streams and their ends, each told once and freed whole."""

from __future__ import annotations

import msgspec
import pytest

from rtp.core.events import Drain, From, FrontendDown, FrontendUp, RunnerFailed
from rtp.core.messages import Ack, AckItem, Cancel, ChoiceState, Fence, Rejected, Tokens
from rtp.core.types import pack_ids
from tests.core.worker.rig import F, Rig

BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])


def refusals(rig: Rig):
    return [(r.request_id, r.attempt, r.reason, r.retry) for r in rig.rejected]


# ---------------------------------------------------------------- cancel


@BOTH
@pytest.mark.parametrize("steps", range(16))
def test_o03_o04_cancel_at_each_phase_returns_all_blocks(steps_in_flight, steps):
    """Waiting, in chunks of the prompt, at the first token, decoding, ended but not acked."""
    rig = Rig(steps_in_flight=steps_in_flight, max_batch_tokens=16, auto_ack=steps % 2 == 0)
    other = rig.submit("other", range(100, 150), 12)
    rig.submit("a", range(80), 5, n=2)
    rig.run(until=lambda: len(rig.runners[0].plans) >= steps)
    rig.cancel("a")
    assert all(seq.request_id != "a" for seq in live(rig))
    rig.auto_ack = True
    rig.tell(FrontendUp(F))
    rig.run()
    rig.assert_right(other)
    assert rig.master.ends["a", 0].reason in ("cancelled", "done")
    rig.assert_quiet()


def live(rig: Rig):
    batcher = rig.worker._ranks[0].batcher
    return [*batcher._running, *batcher._waiting.values(), *batcher._parked.values()]


def test_a_parked_sequence_is_cancelled_too():
    rig = Rig(auto_ack=False, max_unacked=4)
    rig.submit("a", range(10), 40)
    rig.run(5.0)
    assert rig.worker.overview()["ranks"][0]["waiting"] == 1
    rig.cancel("a")
    rig.assert_quiet()


# ---------------------------------------------------------------- streams


@BOTH
def test_tokens_are_replayed_after_a_reconnect(steps_in_flight):
    """Frames lost with the connection come again, and the tokens are complete and in order."""
    rig = Rig(steps_in_flight=steps_in_flight)
    submit = rig.submit("a", range(10), 20, n=2, logprobs=1)
    rig.run(until=lambda: len(rig.outputs["a", 0, 0]) == 5)
    rig.lose = lambda message: isinstance(message, Tokens)
    rig.run(0.05)
    rig.tell(FrontendDown(F))
    rig.run(3.0)
    rig.lose = lambda message: False
    assert len(rig.outputs["a", 0, 0]) < 20
    rig.tell(FrontendUp(F))
    rig.tell(From(F, submit))
    rig.run()
    rig.assert_right(submit)
    assert len(rig.logprobs["a", 0, 0]) == len(rig.logprobs["a", 0, 1]) == 20
    assert [lp.token for lp in rig.logprobs["a", 0, 1]] == rig.outputs["a", 0, 1]
    rig.assert_quiet()


def test_a_repeated_submit_replays_from_the_acknowledged_index():
    rig = Rig(auto_ack=False)
    submit = rig.submit("a", range(10), 6, prompt_logprobs=0)
    rig.run(1.0)
    rig.tell(From(F, submit))
    (again,) = rig.frames[-1].runs
    assert (again.first_index, len(again.ids), again.finish) == (0, 6, "length")
    assert len(again.prompt_logprobs) == 9
    rig.tell(From(F, Ack((AckItem(submit.request_id, 0, 0, 4),))))
    rig.tell(From(F, submit))
    (again,) = rig.frames[-1].runs
    assert (again.first_index, again.prompt_logprobs) == (4, ())
    (stream,) = rig.worker._attempts.get("a").streams.values()
    assert stream._prompt_logprobs == (), "what is acknowledged is not kept"
    assert list(again.ids) == rig.expected(submit)[4:]
    rig.tell(From(F, Ack((AckItem(submit.request_id, 0, 0, 6),))))
    rig.tell(From(F, submit))
    (again,) = rig.frames[-1].runs
    assert (again.first_index, again.ids, again.finish) == (6, (), "length")
    rig.tell(From(F, Ack((AckItem(submit.request_id, 0, 0, -1),))))
    count = len(rig.frames)
    rig.tell(From(F, submit))
    assert len(rig.frames) == count
    assert refusals(rig) == [("a", 0, "unknown", True)]
    rig.assert_quiet()
    assert len(rig.master.ends) == 1


def test_one_frame_per_step_holds_all_requests_of_a_frontend():
    rig = Rig()
    rig.submit("a", range(10), 4, n=2)
    rig.submit("b", range(50, 60), 4)
    rig.run()
    steps = len(rig.runners[0].plans)
    assert len(rig.frames) <= steps
    assert max(len(frame.runs) for frame in rig.frames) == 3


def test_stop_in_an_ack_ends_the_choice_quietly():
    rig = Rig()
    submit = rig.submit("a", range(10), 60, n=2)
    rig.run(until=lambda: len(rig.outputs["a", 0, 0]) == 8)
    rig.tell(From(F, Ack((AckItem(submit.request_id, 0, 0, 8, stop=True),))))
    rig.run()
    assert rig.outputs["a", 0, 1] == rig.expected(submit, 1)
    assert len(rig.outputs["a", 0, 0]) <= 9
    assert ("a", 0, 0) not in rig.finishes
    assert rig.master.ends["a", 0].reason == "done"
    rig.assert_quiet()


def test_an_ack_of_another_frontend_or_attempt_is_ignored():
    rig = Rig(auto_ack=False)
    submit = rig.submit("a", range(10), 3)
    rig.run(1.0)
    rig.tell(From("g", Ack((AckItem(submit.request_id, 0, 0, -1),))))
    rig.tell(From(F, Ack((AckItem(submit.request_id, 1, 0, -1),))))
    rig.tell(From(F, Ack((AckItem(submit.request_id, 0, 5, -1, stop=True),))))
    rig.tell(From(F, submit))
    assert len(rig.frames[-1].runs[0].ids) == 3


@BOTH
def test_a_slow_reader_is_parked_and_goes_on_when_it_reads(steps_in_flight):
    rig = Rig(auto_ack=False, max_unacked=8, steps_in_flight=steps_in_flight)
    submit = rig.submit("a", range(10), 60)
    quick = rig.submit("b", range(50, 60), 4)
    rig.run(20.0)
    parked_at = len(rig.outputs["a", 0, 0])
    assert 8 < parked_at <= 10
    assert rig.worker._ranks[0].batcher.load().running == 0
    assert rig.master.statuses[-1].parked == ("a",)
    rig.auto_ack = True
    for request in (submit, quick):
        count = len(rig.outputs[request.request_id, 0, 0])
        item = AckItem(request.request_id, 0, 0, -1 if request is quick else count)
        rig.tell(From(F, Ack((item,))))
    rig.run()
    rig.assert_right(submit, quick)
    rig.assert_quiet()
    assert rig.master.statuses[-1].parked == ()


def test_a_reader_that_goes_on_is_not_cut_later():
    rig = Rig(auto_ack=False, max_unacked=8, sim_params={"d": 1.0})
    submit = rig.submit("a", range(10), 60)
    rig.run(15.0)
    assert len(rig.outputs["a", 0, 0]) == 9
    rig.auto_ack = True
    rig.tell(From(F, Ack((AckItem(submit.request_id, 0, 0, 9),))))
    rig.assert_finishes(submit)
    assert rig.now > 50.0


def test_a_reader_that_stays_slow_is_cut_after_30_s():
    rig = Rig(auto_ack=False, max_unacked=8)
    rig.submit("a", range(10), 60)
    rig.run(29.0)
    assert not rig.rejected
    rig.run(3.0)
    assert refusals(rig) == [("a", 0, "slow_reader", False)]
    rig.assert_quiet()


def test_a_frontend_gone_for_10_s_takes_its_requests_along():
    rig = Rig()
    rig.submit("a", range(10), 200, prompt_logprobs=1)
    rig.run(0.1)
    rig.tell(FrontendDown(F))
    frames = len(rig.frames)
    rig.run(11.0)
    assert len(rig.frames) == frames
    assert rig.master.ends["a", 0].reason in ("cancelled", "done")
    assert rig.worker.overview()["frontends"] == 0
    rig.assert_quiet()


def test_a_passed_deadline_ends_an_attempt_wherever_it_is():
    rig = Rig(max_rows=1)
    rig.submit("a", range(10), 200, deadline_s=1.0)
    rig.submit("b", range(50, 60), 4, deadline_s=0.5)
    rig.submit("c", range(50, 60), 4, deadline_s=0.0)
    rig.run()
    assert sorted(refusals(rig)) == [(name, 0, "deadline", False) for name in "abc"]
    rig.assert_quiet()


def test_an_end_that_is_never_acknowledged_is_forgotten_at_the_deadline():
    rig = Rig(auto_ack=False)
    rig.submit("a", range(10), 3, deadline_s=5.0)
    rig.run(4.0)
    assert not rig.worker.idle()
    rig.run(2.0)
    assert not rig.rejected
    rig.assert_quiet()


# ---------------------------------------------------------------- attempts


def test_a_fenced_attempt_never_runs():
    rig = Rig()
    rig.tell(From("master", Fence("a", 2, 0, 0)))
    rig.submit("a", range(10), 4, attempt=1, number=0)
    rig.submit("a", range(10), 4, attempt=2, number=1)
    third = rig.submit("a", range(10), 4, attempt=3, number=2)
    rig.run()
    assert refusals(rig) == [("a", 1, "tombstone", True), ("a", 2, "tombstone", True)]
    rig.assert_right(third)
    rig.assert_quiet()
    assert {key: end.reason for key, end in rig.master.ends.items()} == {
        ("a", 1): "rejected",
        ("a", 2): "rejected",
        ("a", 3): "done",
    }


def test_a_fence_cancels_what_runs_and_frees_it_at_once():
    rig = Rig()
    rig.submit("a", range(30), 50)
    rig.run(0.1)
    rig.tell(From("master", Fence("a", 0, 0, 0)))
    assert refusals(rig) == [("a", 0, "tombstone", True)]
    assert live(rig) == []
    rig.assert_quiet()
    assert rig.master.ends["a", 0].reason == "cancelled"


@pytest.mark.parametrize("steps", [1, 50])
def test_a_lower_attempt_ends_even_where_the_higher_one_is_refused(steps):
    """Running, or finished and not acknowledged: its frontend has given it up."""
    rig = Rig(ranks=2, auto_ack=False)
    rig.submit("a", range(50), 8)
    rig.run(until=lambda: len(rig.runners[0].plans) >= steps or rig.master.ends)
    rig.tell(RunnerFailed(1, "killed"))
    rig.submit("a", range(50), 8, attempt=1, rank=1)
    assert refusals(rig) == [("a", 1, "shutdown", True)]
    rig.assert_quiet()


def test_a_higher_attempt_replaces_a_lower_one_and_not_the_reverse():
    rig = Rig()
    rig.submit("a", range(30), 20, attempt=1)
    rig.run(0.1)
    second = rig.submit("a", range(30), 20, attempt=2)
    late = rig.submit("a", range(30), 20, attempt=0)
    rig.tell(From(F, late))
    rig.run()
    rig.assert_right(second)
    assert ("a", 1, 0) not in rig.finishes
    assert refusals(rig) == [("a", 0, "tombstone", True)] * 2
    assert rig.master.ends["a", 1].reason == "cancelled"
    rig.assert_quiet()
    assert len(rig.master.ends) == 3


def test_tombstones_last_ten_minutes():
    rig = Rig()
    for name in "ab":
        rig.tell(From(F, Cancel(name, 0, "client")))
    rig.run(599.0)
    rig.submit("a", range(10), 4)
    assert refusals(rig) == [("a", 0, "tombstone", True)]
    assert rig.worker.overview()["tombstones"] == 2
    rig.run(2.0)
    assert rig.worker.overview()["tombstones"] == 1
    rig.assert_finishes(rig.submit("b", range(10), 4))


def test_every_bound_of_a_submit_is_checked():
    rig = Rig()
    good = rig.submit("good", range(10), 4)
    cases = {
        "rank": {"rank": 1},
        "negative": {"rank": -1},
        "empty": {"prompt": b"", "hashes": b""},
        "odd": {"prompt": good.prompt + b"x"},
        "vocabulary": {"prompt": pack_ids([*range(9), 32000])},
        "minus": {"prompt": pack_ids([*range(9), -1])},
        "hashes": {"hashes": b""},
        "namespace": {"namespace": b"\xff" * 32},
        "output": {"choices": (ChoiceState(0, pack_ids([40000])),)},
        "much": {"choices": (ChoiceState(0, pack_ids([1] * 5)),)},
        "none": {"choices": ()},
        "twice": {"choices": (ChoiceState(0), ChoiceState(0))},
        "choice": {"choices": (ChoiceState(-1),)},
        "time": {"deadline_s": float("nan")},
        "number": {"number": 1 << 70},
    }
    for name, change in cases.items():
        rig.tell(From(F, msgspec.structs.replace(good, request_id=name, **change)))
    assert refusals(rig) == [(name, 0, "invalid", False) for name in cases]
    long = msgspec.structs.replace(good.sampling, max_tokens=10_000)
    rig.tell(From(F, msgspec.structs.replace(good, request_id="long", sampling=long)))
    assert rig.rejected[-1] == Rejected("long", 0, "too_long", False)
    rig.run()
    rig.assert_right(good)
    rig.assert_quiet()
    assert len(rig.master.ends) == len(cases) + 2


def test_a_full_worker_refuses_more():
    rig = Rig(max_attempts=2)
    rig.submit("a", range(10), 4)
    rig.submit("b", range(10), 4)
    rig.submit("c", range(10), 4)
    assert refusals(rig) == [("c", 0, "full", True)]


# ---------------------------------------------------------------- the end of a worker or a rank


def test_draining_refuses_new_work_and_finishes_the_old():
    rig = Rig()
    old = rig.submit("old", range(10), 20)
    rig.run(0.1)
    rig.tell(Drain(30.0))
    rig.submit("new", range(10), 20)
    assert refusals(rig) == [("new", 0, "draining", True)]
    assert not rig.worker.drained
    rig.run(5.0)
    rig.assert_right(old)
    assert rig.worker.drained
    assert rig.master.statuses[-1].draining
    rig.assert_quiet()


def test_draining_gives_up_what_is_left_after_the_grace():
    rig = Rig()
    rig.submit("old", range(10), 240)
    rig.run(0.1)
    rig.tell(Drain(0.5))
    rig.run()
    assert refusals(rig) == [("old", 0, "shutdown", True)]
    assert rig.worker.drained
    rig.assert_quiet()


@BOTH
def test_a_failed_runner_takes_its_rank_and_no_other(steps_in_flight):
    rig = Rig(ranks=2, steps_in_flight=steps_in_flight)
    rig.assert_finishes(rig.submit("before", range(40), 4))
    rig.submit("lost", range(50), 40, n=2)
    kept = rig.submit("kept", range(50), 40, rank=1)
    rig.run(0.1)
    rig.tell(RunnerFailed(0, "killed"))
    assert refusals(rig) == [("lost", 0, "shutdown", True)]
    rig.submit("late", range(50), 40)
    assert refusals(rig)[1:] == [("late", 0, "shutdown", True)]
    rig.run()
    rig.assert_right(kept)
    assert rig.master.ends["lost", 0].reason == "failed"
    rig.assert_quiet()
    assert rig.master.keys[0] == set()
    table = rig.master.statuses[-1].columns()
    assert table[0, 5] == table[0, 6] == 0
    assert table[1, 6] == 256

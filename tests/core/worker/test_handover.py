"""A request that is begun on one worker and goes on at another."""

from __future__ import annotations

import random

import pytest

from rtp.core.events import Drain, From, RunnerFailed
from rtp.core.messages import Ack, AckItem, Place, Source, Submit
from rtp.core.types import RequestId, Role, WorkerId, unpack_ids
from rtp.core.worker.attempts import HANDOVER_S
from tests.core.worker.rig import F, Rig

DECODE = Place(WorkerId("d"), 3, "127.0.0.1:2", 0, 0)
PROMPT = range(10, 33)
"""23 tokens: 5 blocks of 4, and 3 more."""


class Pair:
    """A prefill and a decode worker. A pull succeeds while the source has the pages."""

    def __init__(self, **decode) -> None:
        self.prefill = Rig(role=Role.PREFILL, ticket_key=b"key")
        self.decode = Rig(role=Role.DECODE, **decode)
        self.decode.pull = lambda pull: self.prefill.worker.handovers.holds(
            pull.source.ticket, pull.source.rank
        )

    def begin(self, max_tokens: int = 12, n: int = 1, **sampling) -> Submit:
        """On the prefill worker, to its hand-over."""
        submit = self.prefill.submit("r", PROMPT, max_tokens, n=n, handover=DECODE, **sampling)
        self.prefill.run(until=lambda: len(self.prefill.finishes) == n)
        return submit

    def go_on(self, submit: Submit) -> Submit:
        """On the decode worker, with what the frontend knows by now."""
        rest = [c.choice for c in submit.choices if self.finish(c.choice) == "handover"]
        assert rest == list(range(len(rest))), "choices in order, for rig.submit"
        return self.decode.submit(
            "r",
            PROMPT,
            submit.sampling.max_tokens,
            n=len(rest),
            outputs={i: self.prefill.outputs["r", 0, i] for i in rest},
            sources={i: self.prefill.sources["r", 0, i] for i in rest},
            temperature=submit.sampling.temperature,
            seed=submit.sampling.seed,
        )

    def finish(self, choice: int) -> str:
        return self.prefill.finishes["r", 0, choice]

    def assert_right(self, submit: Submit) -> None:
        for state in submit.choices:
            key = ("r", 0, state.choice)
            assert self.decode.outputs[key] == self.decode.expected(submit, state.choice)

    def assert_quiet(self) -> None:
        self.prefill.run(HANDOVER_S + 1)
        self.prefill.assert_quiet()
        self.decode.assert_quiet()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_is_handed_over_goes_on_as_if_it_had_stayed(n, temperature, steps_in_flight):
    pair = Pair(steps_in_flight=steps_in_flight)
    submit = pair.begin(n=n, temperature=temperature, seed=5)
    assert all(len(pair.prefill.outputs["r", 0, i]) == 1 for i in range(n))
    assert pair.prefill.master.ends["r", 0].reason == "handed_over"
    pair.go_on(submit)
    pair.decode.run()
    pair.assert_right(submit)
    assert [(p.start, p.num_tokens) for p in pair.decode.pulls] == [(0, 20)], "once for all choices"
    computed = pair.decode.worker.stats.computed_tokens
    assert computed <= n * (4 + 12 + steps_in_flight), "the tail and the output, no more"
    assert pair.decode.master.ends["r", 0].reason == "done"
    pair.assert_quiet()


def test_pages_are_kept_until_the_frontend_lets_go():
    """And not a moment longer: whoever acknowledges or cancels ends the pin."""
    for let_go in (
        lambda rig: rig.cancel("r"),
        lambda rig: rig.tell(From(F, Ack((AckItem(RequestId("r"), 0, 0, -1),)))),
    ):
        pair = Pair()
        pair.begin()
        source = pair.prefill.sources["r", 0, 0]
        blocks = pair.prefill.worker._ranks[0].batcher.blocks
        assert (source.worker_id, source.epoch, source.num_tokens) == ("w", 7, 20)
        assert blocks.num_available == blocks.num_blocks - 5
        pair.prefill.run(HANDOVER_S / 2)
        assert pair.prefill.worker.handovers.holds(source.ticket, 0)
        let_go(pair.prefill)
        assert not pair.prefill.worker.handovers.holds(source.ticket, 0)
        assert blocks.num_available == blocks.num_blocks
        assert [end.reason for end in pair.prefill.master.end_frames] == ["handed_over"]


def test_p03_a_transfer_that_never_comes_holds_nothing_after_its_lease():
    """Cases P03, P11: the clock starts with the hand-over."""
    pair = Pair()
    pair.begin()
    pair.prefill.run(HANDOVER_S - 0.5)
    assert len(pair.prefill.worker.handovers) == 1
    pair.prefill.run(1.0)
    assert len(pair.prefill.worker.handovers) == 0
    pair.prefill.assert_quiet()


def test_p02_what_does_not_come_is_computed():
    """Case P02: a transfer that fails costs time, never a request; its pages are used anew."""
    pair = Pair()
    pair.decode.pull = lambda pull: False
    submit = pair.begin()
    pair.go_on(submit)
    pair.decode.run()
    pair.assert_right(submit)
    assert pair.decode.worker.stats.pulls_failed == len(pair.decode.pulls) == 1
    assert [note.event for note in pair.decode.notes] == ["pull.failed"]
    pair.assert_quiet()


def test_of_several_choices_one_waits_in_vain():
    """The source is gone, and they run one after the other: its time limits must not add up."""
    pair = Pair(sim_params={"num_blocks": 14})
    pair.decode.pull = lambda pull: False
    pair.decode.pull_s = 5.0
    outputs = {i: list(range(100 * i + 100, 100 * i + 120)) for i in range(3)}
    submit = pair.prefill.submit("r", PROMPT, 24, n=3, outputs=outputs, handover=DECODE)
    pair.prefill.run(until=lambda: len(pair.prefill.finishes) == 3)
    pair.go_on(submit)
    pair.decode.run()
    assert [len(pair.decode.outputs["r", 0, i]) for i in range(3)] == [24] * 3
    assert len(pair.decode.pulls) == pair.decode.worker.stats.pulls_failed == 1
    pair.assert_quiet()


def test_p03_pages_under_a_transfer_are_nobodys_until_it_ends():
    """Cases P03, P07: the client leaves while it runs; what it writes then hurts no one."""
    pair = Pair(sim_params={"num_blocks": 8})
    pair.decode.pull_s = 1.0
    submit = pair.begin()
    pair.go_on(submit)
    pair.decode.run(0.1)
    pages = pair.decode.pulls[0].pages
    pair.decode.cancel("r")
    blocks = pair.decode.worker._ranks[0].batcher.blocks
    assert blocks.num_available == blocks.num_blocks - len(pages) // 4
    other = pair.decode.submit("other", range(50, 58), 4)
    pair.decode.run(0.5)
    rows = [row for plan in pair.decode.runners[0].plans for row in plan.rows]
    used = {page for row in rows for page in unpack_ids(row.pages)}
    pair.decode.assert_right(other)
    assert used
    assert not used & set(unpack_ids(pages))
    pair.assert_quiet()


def test_who_runs_alone_waits_for_pages_under_a_transfer():
    """It needs more than what the transfer leaves, and nobody is left to be preempted."""
    pair = Pair(sim_params={"num_blocks": 8})
    pair.decode.pull_s = 1.0
    pair.go_on(pair.begin())
    pair.decode.run(0.1)
    pair.decode.cancel("r")
    other = pair.decode.submit("other", range(50, 58), 16)
    pair.decode.run()
    pair.decode.assert_right(other)
    assert pair.decode.worker.stats.preemptions == 0
    pair.assert_quiet()


def test_pins_make_way_for_who_runs_alone():
    """What decodes on a prefill rank needs the pages that are kept for another worker."""
    pair = Pair()
    pair.prefill = Rig(role=Role.PREFILL, sim_params={"num_blocks": 8})
    pair.begin(max_tokens=4)
    assert len(pair.prefill.worker.handovers) == 1
    other = pair.prefill.submit("other", range(50, 58), 16)
    pair.prefill.run()
    pair.prefill.assert_right(other)
    assert not pair.prefill.worker.handovers
    pair.prefill.cancel("r")
    pair.prefill.assert_quiet()


def test_a_transfer_waits_for_steps_that_touch_its_pages():
    """Pages of a sequence that was given up may still be written by a step in flight."""
    pair = Pair(steps_in_flight=2, sim_params={"num_blocks": 9})
    submit = pair.begin()
    gone = pair.decode.submit("gone", range(60, 80), 8)
    pair.decode.run(until=lambda: len(pair.decode.runners[0].plans) >= 1)
    pair.decode.cancel("gone")
    pair.go_on(submit)
    assert not pair.decode.pulls, "a step is in flight"
    pair.decode.run()
    assert len(pair.decode.pulls) == 1
    pair.assert_right(submit)
    assert gone.request_id == "gone"
    pair.assert_quiet()


def test_a_prompt_that_ends_with_its_first_token_is_not_handed_over():
    pair = Pair()
    submit = pair.begin(max_tokens=1)
    assert pair.finish(0) == "length"
    assert pair.prefill.master.ends["r", 0].reason == "done"
    assert not pair.prefill.sources
    pair.prefill.assert_right(submit)
    pair.assert_quiet()


def test_what_the_decode_rank_has_is_not_pulled():
    pair = Pair()
    before = pair.decode.submit("before", PROMPT, 4)
    pair.decode.run()
    pair.decode.assert_right(before)
    submit = pair.begin()
    pair.go_on(submit)
    pair.decode.run()
    pair.assert_right(submit)
    assert not pair.decode.pulls
    pair.assert_quiet()


@pytest.mark.parametrize("when", ["pulling", "running"])
def test_a_decode_runner_that_fails_gives_up_and_keeps_nothing(when):
    pair = Pair()
    pair.decode.pull_s = 1.0 if when == "pulling" else 0.0
    submit = pair.begin()
    pair.go_on(submit)
    pair.decode.run(0.1)
    pair.decode.tell(RunnerFailed(0, "test"))
    pair.decode.run(2.0)
    assert [(r.request_id, r.retry) for r in pair.decode.rejected] == [("r", True)]
    assert pair.decode.worker.idle()


def test_a_source_that_fails_or_drains():
    """A Runner that is gone has no pages; a drain lets a hand-over be fetched."""
    pair = Pair()
    pair.begin()
    ticket = pair.prefill.sources["r", 0, 0].ticket
    pair.prefill.tell(Drain(5.0))
    assert pair.prefill.worker.handovers.holds(ticket, 0)
    assert not pair.prefill.worker.drained
    pair.prefill.tell(RunnerFailed(0, "test"))
    assert not pair.prefill.worker.handovers.holds(ticket, 0)
    pair.prefill.run(6.0)
    assert pair.prefill.worker.drained


def test_pins_do_not_keep_out_the_last_choice_of_their_own_request():
    """Three resumed choices, of which two fill the pool: all are handed over, the first of them
    without its pages."""
    rig = Rig(role=Role.PREFILL, sim_params={"num_blocks": 16})
    outputs = {i: list(range(100 * i, 100 * i + 20)) for i in (1, 2, 3)}
    outputs = {i - 1: ids for i, ids in outputs.items()}
    submit = rig.submit("r", PROMPT, 40, n=3, outputs=outputs, handover=DECODE)
    rig.run(until=lambda: len(rig.finishes) == 3)
    assert set(rig.finishes.values()) == {"handover"}
    sources = [rig.sources["r", 0, state.choice] for state in submit.choices]
    assert [rig.worker.handovers.holds(s.ticket, 0) for s in sources] == [False, True, True]
    rig.cancel("r")
    rig.assert_quiet()


def test_a_ticket_is_for_one_worker_and_cannot_be_guessed():
    tickets = set()
    for key in (b"key", b"other"):
        for owner in ("d", "e"):
            rig = Rig(role=Role.PREFILL, ticket_key=key)
            place = Place(WorkerId(owner), 3, "127.0.0.1:2", 0, 0)
            rig.submit("r", PROMPT, handover=place)
            rig.run(until=lambda rig=rig: bool(rig.sources))
            source = rig.sources["r", 0, 0]
            assert not rig.worker.handovers.holds(source.ticket, 1)
            tickets.add(source.ticket)
    assert len(tickets) == 4


def test_many_hand_overs_beside_each_other_leave_right_output():
    """Tight pools, shared prefixes, transfers that fail, clients that leave."""
    draw = random.Random(3)
    pair = Pair(sim_params={"num_blocks": 24}, steps_in_flight=2, max_rows=4)
    holds = pair.decode.pull
    pair.decode.pull = lambda pull: holds(pull) and draw.random() < 0.7
    heads = [[draw.randrange(3, 900) for _ in range(16)] for _ in range(2)]
    submits = []
    for number in range(40):
        prompt = draw.choice(heads) + [draw.randrange(3, 900) for _ in range(draw.randrange(1, 9))]
        name, most = f"r{number}", draw.randrange(2, 24)
        begun = pair.prefill.submit(name, prompt, most, handover=DECODE)
        pair.prefill.run(until=lambda name=name: (name, 0, 0) in pair.prefill.finishes)
        if pair.prefill.finishes[name, 0, 0] != "handover":
            continue
        key = (name, 0, 0)
        outputs, sources = {0: pair.prefill.outputs[key]}, {0: pair.prefill.sources[key]}
        pair.decode.pull_s = draw.choice([0.0, 0.02, 0.3])
        pair.decode.submit(name, prompt, most, outputs=outputs, sources=sources)
        pair.decode.run(draw.choice([0.0, 0.05, 0.2]))
        if draw.random() < 0.2:
            pair.decode.cancel(name)
        else:
            submits.append(begun)
        if draw.random() < 0.5:
            pair.prefill.cancel(name)
    pair.decode.run()
    rejected = {r.request_id for r in pair.decode.rejected}
    for submit in submits:
        if submit.request_id not in rejected:
            key = (submit.request_id, 0, 0)
            assert pair.decode.outputs[key] == pair.decode.expected(submit)
    assert len(pair.decode.pulls) > 10
    assert 0 < pair.decode.worker.stats.pulls_failed < len(pair.decode.pulls)
    pair.assert_quiet()


def test_a_source_without_a_whole_block_is_no_source():
    pair = Pair()
    empty = Source(WorkerId("w"), 7, "127.0.0.1:1", 0, b"t", 0)
    submit = pair.decode.submit("r", range(3), 8, sources={0: empty})
    pair.decode.run()
    pair.decode.assert_right(submit)
    assert not pair.decode.pulls

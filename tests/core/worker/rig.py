"""A Worker, sim Runners, a Master and a frontend in virtual time; every step is checked."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from rtp.backends import sim
from rtp.core.commands import Note, Pull, RunStep, Send
from rtp.core.events import Event, From, FrontendUp, MasterUp, Pulled, StepDone, Tick
from rtp.core.hashing import block_hashes, namespace
from rtp.core.messages import (
    Ack,
    AckItem,
    Cancel,
    ChoiceState,
    Delta,
    Finished,
    FirstToken,
    Now,
    Place,
    Poll,
    Register,
    Rejected,
    Snapshot,
    Source,
    Status,
    Submit,
    Tokens,
)
from rtp.core.steps import StepPlan
from rtp.core.types import (
    FrontendId,
    RequestId,
    Role,
    SamplingParams,
    WorkerId,
    pack_ids,
    split_hashes,
    unpack_ids,
)
from rtp.core.worker.worker import Worker
from tests.support.runners import CheckedRunner

F = FrontendId("f")
SEED = namespace(secret=b"secret", revision="r")


class Master:
    """Keeps a view of the worker's cache by the protocol, and everything it was told."""

    def __init__(self) -> None:
        self.term = 1
        self.keys: list[set[bytes]] = []
        self.version = -1
        self.acked_seq = -1
        self.statuses: list[Status] = []
        self.firsts: dict[tuple[str, int], FirstToken] = {}
        self.ends: dict[tuple[str, int], Finished] = {}
        self.end_frames: list[Finished] = []
        self.registered = 0
        self.snapshots = 0
        self.deltas = 0
        self._next_slice = (-1, 0)

    def poll(self) -> Poll:
        return Poll(self.term, 0.02, 0.05, self.acked_seq, self.version)

    def receive(self, message: object) -> bool:
        """Returns whether a Poll should follow."""
        match message:
            case Register():
                self.registered += 1
                return False
            case Status() | Now():
                for first in message.first_tokens:
                    self.firsts[first.request_id, first.attempt] = first
                for end in message.finished:
                    known = self.ends.setdefault((end.request_id, end.attempt), end)
                    assert known == end, "an attempt ended twice"
                if isinstance(message, Now):
                    self.end_frames += message.finished
                    return False
                assert message.seq > self.acked_seq
                self.acked_seq = message.seq
                self.statuses.append(message)
            case Snapshot(_, _, version, index, count, changes):
                if index == 0:
                    self.keys = [set() for _ in self.keys]
                    self._next_slice = (version, 0)
                self.snapshots += 1
                if self._next_slice != (version, index):
                    self.version = -1  # a slice was lost
                    return True
                self._next_slice = (version, index + 1)
                self._apply(changes)
                self.version = version if index == count - 1 else -1
            case Delta(_, _, from_version, to_version, changes):
                if from_version != self.version:
                    self.version = -1
                else:
                    self._apply(changes)
                    self.version = to_version
                self.deltas += 1
        return True

    def _apply(self, changes: Iterable[Any]) -> None:
        for change in changes:
            added, removed = split_hashes(change.added), split_hashes(change.removed)
            assert not self.keys[change.rank] & set(added)
            assert self.keys[change.rank] >= set(removed)
            self.keys[change.rank] |= set(added)
            self.keys[change.rank] -= set(removed)


class Rig:
    """`worker` with everything around it; all times virtual, all order stated."""

    def __init__(
        self,
        *,
        ranks: int = 1,
        master: bool = True,
        auto_ack: bool = True,
        make: type[Worker] = Worker,
        role: Role = Role.FUSION,
        sim_params: dict[str, Any] | None = None,
        lockstep: bool = False,
        **worker_params: Any,
    ) -> None:
        self.sim_params = {"num_blocks": 64, "block_size": 4, "max_model_len": 256} | (
            sim_params or {}
        )
        self.runners = [CheckedRunner(sim.build(**self.sim_params)) for _ in range(ranks)]
        capacity = self.runners[0].capacity
        self.rule = self.runners[0].runner._rule
        self.card = Register(
            worker_id=WorkerId("w"),
            epoch=7,
            address="127.0.0.1:1",
            role=role,
            ranks=ranks,
            kv_total=(capacity.num_blocks * capacity.block_size,) * ranks,
            block_size=capacity.block_size,
            model="m",
            max_model_len=capacity.max_model_len,
            card="c",
            kv_format="sim",
            key_id="k",
            max_batch_tokens=worker_params.get("max_batch_tokens", 512),
            lockstep=lockstep,
        )
        self.worker = make(self.card, [r.capacity for r in self.runners], **worker_params)
        self.now = 1.0
        self.master = Master()
        self.master.keys = [set() for _ in range(ranks)]
        self.lose: Callable[[object], bool] = lambda message: False
        self.auto_ack = auto_ack
        self.outputs: dict[tuple[str, int, int], list[int]] = {}
        self.finishes: dict[tuple[str, int, int], str] = {}
        self.stop_tokens: dict[tuple[str, int, int], int] = {}
        self.cached: dict[tuple[str, int, int], int] = {}
        self.prompt_logprobs: dict[tuple[str, int], tuple[Any, ...]] = {}
        self.logprobs: dict[tuple[str, int, int], list[Any]] = {}
        self.rejected: list[Rejected] = []
        self.frames: list[Tokens] = []
        self.notes: list[Note] = []
        self.sources: dict[tuple[str, int, int], Source] = {}
        self.pulls: list[Pull] = []
        self.pull: Callable[[Pull], bool] = lambda command: True
        """How a transfer ends that was begun."""
        self.pull_s = 0.01
        self.grants = [0] * ranks
        self.submitted: list[Submit] = []
        self._events: list[tuple[float, int, Event]] = []
        self._count = 0
        self._busy_until = [0.0] * ranks
        self._step_ends: dict[int, float] = {}
        self.steps: list[tuple[float, int, StepPlan]] = []
        """When a step begins, on which rank; those of a lock-step group begin together."""
        if master:
            self.tell(MasterUp(self.master.term))
            self.tell(From("master", self.master.poll()))
        self.tell(FrontendUp(F))

    # ------------------------------------------------------------ what tests do

    def submit(
        self,
        request_id: str,
        prompt: Iterable[int],
        max_tokens: int = 8,
        *,
        attempt: int = 0,
        rank: int = 0,
        n: int = 1,
        outputs: dict[int, list[int]] | None = None,
        deadline_s: float = 600.0,
        number: int | None = None,
        group: tuple[int, int] = (-1, 1),
        handover: Place | None = None,
        sources: dict[int, Source] | None = None,
        **sampling: Any,
    ) -> Submit:
        """Sends a Submit now and returns it. group: id and size of its grant round."""
        if number is None:
            number = self.grants[rank]
            self.grants[rank] += 1
        ids = pack_ids(prompt)
        message = Submit(
            request_id=RequestId(request_id),
            attempt=attempt,
            rank=rank,
            number=number,
            prompt=ids,
            hashes=block_hashes(ids, self.card.block_size, SEED),
            namespace=SEED,
            sampling=SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | sampling)),
            choices=tuple(
                ChoiceState(
                    choice, pack_ids((outputs or {}).get(choice, [])), (sources or {}).get(choice)
                )
                for choice in range(n)
            ),
            deadline_s=deadline_s,
            group_id=group[0],
            group_size=group[1],
            handover=handover,
        )
        for state in message.choices:
            key = (request_id, attempt, state.choice)
            self.outputs.setdefault(key, list((outputs or {}).get(state.choice, [])))
        self.submitted.append(message)
        self.tell(From(F, message))
        return message

    def tell(self, event: Event) -> None:
        """An event, and the Tick that ends its turn."""
        self._do(event)
        self._do(Tick())

    def run(self, seconds: float = 1e9, until: Callable[[], bool] | None = None) -> None:
        """Until nothing is left to do (but beats), the time is over, or the condition holds."""
        end = self.now + seconds
        while not (until and until()):
            deadline = self.worker.next_deadline()
            times = [self._events[0][0]] if self._events else []
            times += [deadline] if deadline is not None else []
            if not times or (seconds >= 1e9 and not self._events and self.worker.idle()):
                return
            if min(times) > end:
                break
            self.now = max(self.now, min(times))
            while self._events and self._events[0][0] <= self.now:
                self._do(heapq.heappop(self._events)[2])
            self._do(Tick())
        if seconds < 1e9 and not (until and until()):
            self.now = end

    def expected(self, submit: Submit, choice: int = 0, output: Iterable[int] = ()) -> list[int]:
        prompt = np.frombuffer(submit.prompt, "<i4").tolist()
        return sim.expected_tokens(self.rule, prompt, submit.sampling, choice, list(output))

    def assert_right(self, *submits: Submit) -> None:
        """Every choice of these finished with just the output the rule gives for it alone."""
        for submit in submits:
            for state in submit.choices:
                key = (submit.request_id, submit.attempt, state.choice)
                want = self.expected(submit, state.choice, unpack_ids(state.output))
                assert self.outputs[key] == want, key
                assert self.finishes[key] in ("stop", "length")

    def assert_finishes(self, submit: Submit) -> None:
        """Runs until this one has ended, which it must do well."""
        keys = [(submit.request_id, submit.attempt, state.choice) for state in submit.choices]
        self.run(until=lambda: all(key in self.finishes for key in keys))
        self.assert_right(submit)

    def cancel(self, request_id: str, attempt: int = 0) -> None:
        self.tell(From(F, Cancel(RequestId(request_id), attempt, "client")))

    def assert_quiet(self) -> None:
        """Idle, all blocks back, every end told once, the Master's view equal to the truth."""
        self.run(2.0)
        assert self.worker.idle()
        self.worker.check()
        assert self.worker._reports.num_unacked == 0
        for rank, state in enumerate(self.worker._ranks):
            blocks = state.batcher.blocks
            assert blocks.num_available == blocks.num_blocks
            assert self.master.keys[rank] == set(blocks.keys())

    def later(self, delay: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, event))

    # ------------------------------------------------------------ its surroundings

    def _do(self, event: Event) -> None:
        for command in self.worker.handle(event, self.now):
            match command:
                case RunStep(rank, plan):
                    result = self.runners[rank].execute(plan)
                    start = max(self.now, self._busy_until[rank])
                    if self.card.lockstep:
                        start = max(start, self._step_ends.get(plan.step - 1, 0.0))
                        end = max(self._step_ends.get(plan.step, 0.0), start + result.elapsed_s)
                        self._step_ends[plan.step] = end
                    self.steps.append((start, rank, plan))
                    self._busy_until[rank] = start + result.elapsed_s
                    self.later(self._busy_until[rank] - self.now, StepDone(rank, result))
                case Pull():
                    self.pulls.append(command)
                    ended = Pulled(command.rank, command.number, self.pull(command))
                    self.later(self.pull_s, ended)
                case Send("master", message):
                    if not self.lose(message) and self.master.receive(message):
                        self.later(0.0, From("master", self.master.poll()))
                case Send(peer, message):
                    assert peer == F
                    if not self.lose(message):
                        self._frontend(message)
                case Note():
                    self.notes.append(command)
        self.worker.check()

    def _frontend(self, message: object) -> None:
        if isinstance(message, Rejected):
            self.rejected.append(message)
            return
        assert isinstance(message, Tokens)
        self.frames.append(message)
        acks = []
        for run in message.runs:
            key = (run.request_id, run.attempt, run.choice)
            got = self.outputs.setdefault(key, [])
            assert run.first_index <= len(got), "a gap in the tokens"
            overlap = got[run.first_index :]
            assert list(run.ids[: len(overlap)]) == overlap[: len(run.ids)], "tokens changed"
            fresh = run.ids[len(overlap) :]
            got += fresh
            if run.logprobs and fresh:
                self.logprobs.setdefault(key, []).extend(run.logprobs[len(overlap) :])
            if run.finish:
                assert self.finishes.setdefault(key, run.finish) == run.finish
                self.stop_tokens[key] = run.stop_token
            self.cached[key] = max(self.cached.get(key, 0), run.cached_tokens)
            if run.source is not None:
                self.sources[key] = run.source
            if run.prompt_logprobs:
                self.prompt_logprobs[run.request_id, run.attempt] = run.prompt_logprobs
            ended = run.finish and run.finish != "handover"
            next_index = -1 if ended else len(got)
            acks.append(AckItem(run.request_id, run.attempt, run.choice, next_index))
        if self.auto_ack:
            self.later(0.001, From(F, Ack(tuple(acks))))

"""A frontend in any order of events: grants, tokens repeated and out of order, streams that break,
workers that die or restart, clients that pause or leave. Each request ends exactly once, and what
its client got is exactly what the workers' rule generates.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import fields

import pytest

from rtp.core.commands import Command, Connect, Deliver, Ended, Failed, Note, Send
from rtp.core.events import (
    ClientGone,
    ClientPaused,
    ClientReady,
    Event,
    From,
    MasterDown,
    MasterUp,
    StreamDown,
    StreamUp,
    Tick,
)
from rtp.core.frontend.lives import Counters
from rtp.core.messages import (
    Ack,
    Ask,
    Cancel,
    Rejected,
    Submit,
    TokenRun,
    Tokens,
    WorkerLost,
)
from rtp.core.types import RequestId, WorkerId, unpack_ids
from tests.core.frontend.support import FIRST, SECOND, a_begin, a_frontend, a_grant

WORKERS = (FIRST, SECOND)
MAX_TOKENS = 12
STOP = "cab"
Output = tuple[str, int]
"""Request and choice."""


def letter(request_id: str, choice: int, index: int) -> int:
    """The rule that every worker generates by; some streams contain STOP."""
    number = int(request_id) * 7 + choice * 3
    return ord("abc"[(number + index * (1 + number % 2)) % 3])


def a_model_run(request_id: str, attempt: int, choice: int, first: int, end: int) -> TokenRun:
    ids = tuple(letter(request_id, choice, i) for i in range(first, end))
    finish = "length" if end == MAX_TOKENS else ""
    return TokenRun(RequestId(request_id), attempt, choice, first, ids, finish=finish)


class ModelWorker:
    """One life of a worker, in the terms of the protocol and nothing more."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.dead: dict[str, int] = {}
        self.running: dict[str, tuple[int, dict[int, list[int]]]] = {}
        """request -> attempt, choice -> [first unacknowledged, next to generate]."""

    def submit(self, message: Submit) -> Rejected | None:
        request_id, attempt = message.request_id, message.attempt
        if attempt <= self.dead.get(request_id, 0):
            return Rejected(request_id, attempt, "tombstone", True)
        if request_id not in self.running or self.running[request_id][0] < attempt:
            spans = {}
            for state in message.choices:
                output = unpack_ids(state.output)
                assert output == [letter(request_id, state.choice, i) for i in range(len(output))]
                spans[state.choice] = [len(output), len(output)]
            self.running[request_id] = (attempt, spans)
        return None

    def step(self, count: int) -> list[TokenRun]:
        """Up to `count` more tokens of every choice that has not all."""
        runs = []
        for request_id, (attempt, spans) in self.running.items():
            for choice, span in spans.items():
                first, span[1] = span[1], min(span[1] + count, MAX_TOKENS)
                if span[1] > first:
                    runs.append(a_model_run(request_id, attempt, choice, first, span[1]))
        return runs

    def runs(self, request_id: str) -> list[TokenRun]:
        """Everything not acknowledged."""
        attempt, spans = self.running[request_id]
        return [
            a_model_run(request_id, attempt, choice, first, end)
            for choice, (first, end) in spans.items()
            if end > first or end == MAX_TOKENS
        ]

    def ack(self, message: Ack) -> None:
        for item in message.items:
            attempt, spans = self.running.get(item.request_id, (0, {}))
            if attempt == item.attempt and item.choice in spans:
                if not item.stop and item.next_index >= 0:
                    spans[item.choice][0] = item.next_index
                    continue
                del spans[item.choice]
                if not spans:
                    del self.running[item.request_id]
                    self.dead[item.request_id] = attempt

    def cancel(self, message: Cancel) -> None:
        self.dead[message.request_id] = max(self.dead.get(message.request_id, 0), message.attempt)
        if self.running.get(message.request_id, (0,))[0] <= message.attempt:
            self.running.pop(message.request_id, None)


class World:
    """A frontend, two workers and a Master; everything that happens is drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.frontend = a_frontend(max_replacements=10_000)
        self.now = 0.0
        self.asks: dict[str, Ask] = {}
        self.workers = {worker_id: ModelWorker(1) for worker_id in WORKERS}
        self.open: dict[WorkerId, int] = {}
        """Epoch of the worker that a stream that is up leads to."""
        self.opening: dict[WorkerId, tuple[Connect, list[object]]] = {}
        self.flying: dict[WorkerId, list[Tokens | Rejected]] = defaultdict(list)
        self.master_up = True
        self.num_begun = 0
        self.num_grants = 0
        self.text: dict[Output, str] = defaultdict(str)
        self.ids: dict[Output, list[int]] = defaultdict(list)
        self.finish: dict[Output, str] = {}
        self.ends: dict[str, str] = {}
        self.n: dict[str, int] = {}
        self.stops: dict[str, bool] = {}

    # ------------------------------------------------------------ the world around it

    def tell(self, *events: Event) -> None:
        for event in (*events, Tick()):
            for command in self.frontend.handle(event, self.now):
                self.perform(command)
            self.frontend.check()

    def perform(self, command: Command) -> None:
        match command:
            case Send(peer="master", message=message):
                if self.master_up:
                    self.to_master(message)
            case Send(peer=peer, message=message):
                if peer in self.opening:
                    self.opening[WorkerId(peer)][1].append(message)
                else:
                    self.to_worker(WorkerId(peer), message)
            case Connect(worker_id=worker_id):
                self.open.pop(worker_id, None)
                self.flying[worker_id].clear()
                self.opening[worker_id] = (command, [])
            case Deliver():
                self.deliver(command)
            case Ended(request_id=request_id) | Failed(request_id=request_id):
                assert request_id not in self.ends
                self.ends[request_id] = type(command).__name__
            case Note():
                pass
            case _:
                raise AssertionError(command)

    def to_master(self, message: object) -> None:
        match message:
            case Ask():
                known = self.asks.get(message.request_id)
                assert known is None or message.attempt >= known.attempt
                self.asks[message.request_id] = message
            case Cancel():
                asked = self.asks.get(message.request_id)
                if asked is not None and asked.attempt <= message.attempt:
                    del self.asks[message.request_id]
            case _:
                raise AssertionError(message)

    def to_worker(self, worker_id: WorkerId, message: object) -> None:
        worker = self.workers[worker_id]
        if self.open.get(worker_id) != worker.epoch:
            return  # dropped with the connection
        match message:
            case Submit():
                refusal = worker.submit(message)
                if refusal:
                    self.flying[worker_id].append(refusal)
                else:
                    self.send_again(worker_id, message.request_id)
            case Ack():
                worker.ack(message)
            case Cancel():
                worker.cancel(message)
            case _:
                raise AssertionError(message)

    def send_again(self, worker_id: WorkerId, request_id: str) -> None:
        if runs := self.workers[worker_id].runs(request_id):
            self.flying[worker_id].append(Tokens(tuple(runs)))

    def deliver(self, command: Deliver) -> None:
        request_id = command.request_id
        assert request_id not in self.ends
        for chunk in command.chunks:
            output = (request_id, chunk.choice)
            assert output not in self.finish
            assert chunk.text or chunk.ids or chunk.finish
            self.text[output] += chunk.text
            self.ids[output] += chunk.ids
            expected = [letter(*output, i) for i in range(len(self.ids[output]))]
            assert self.ids[output] == expected
            if chunk.finish:
                self.finish[output] = chunk.finish
        mine = [len(ids) for (owner, _), ids in self.ids.items() if owner == request_id]
        assert command.generated == sum(mine)

    def live(self) -> list[str]:
        return [request_id for request_id in self.n if request_id not in self.ends]

    # ------------------------------------------------------------ what may happen

    def begin(self) -> None:
        request_id = str(self.num_begun)
        self.num_begun += 1
        self.n[request_id] = self.rng.randint(1, 2)
        self.stops[request_id] = self.rng.random() < 0.5
        self.tell(
            a_begin(
                request_id,
                n=self.n[request_id],
                stop=(STOP,) if self.stops[request_id] else (),
                max_tokens=MAX_TOKENS,
                timeout_s=1e9,
            )
        )

    def grant(self) -> None:
        """Sometimes the Ask stays, so that it is granted twice, as after a repeat."""
        if not self.asks:
            return
        ask = self.rng.choice(list(self.asks.values()))
        if self.rng.random() < 0.9:
            del self.asks[ask.request_id]
        worker_id = self.rng.choice(WORKERS)
        epoch = self.workers[worker_id].epoch
        self.num_grants += 1
        grant = a_grant(ask.attempt, worker_id, epoch, self.num_grants, ask.request_id)
        self.tell(From("master", grant))

    def opened(self, fail: float = 0.2) -> None:
        if not self.opening:
            return
        worker_id = self.rng.choice(list(self.opening))
        connect, waiting = self.opening.pop(worker_id)
        if connect.epoch != self.workers[worker_id].epoch or self.rng.random() < fail:
            self.tell(StreamDown(worker_id, refused=self.rng.random() < 0.3))
            return
        self.open[worker_id] = connect.epoch
        for request_id in self.workers[worker_id].running:
            self.send_again(worker_id, request_id)
        for message in waiting:
            self.to_worker(worker_id, message)
        self.tell(StreamUp(worker_id, connect.epoch))

    def step(self) -> None:
        """Every choice on a worker grows; what is sent over a broken stream is lost."""
        worker_id = self.rng.choice(WORKERS)
        worker = self.workers[worker_id]
        runs = worker.step(self.rng.randint(1, 4))
        if runs and self.open.get(worker_id) == worker.epoch:
            self.flying[worker_id].append(Tokens(tuple(runs)))

    def arrive(self, disorder: float = 0.1) -> None:
        """Some frames of one turn; now and then not the first, or one that will come again."""
        worker_id = self.rng.choice(WORKERS)
        frames = self.flying[worker_id]
        events: list[Event] = []
        for _ in range(min(len(frames), self.rng.randint(1, 3))):
            index = self.rng.randrange(len(frames)) if self.rng.random() < disorder else 0
            again = self.rng.random() < disorder
            events.append(From(worker_id, frames[index] if again else frames.pop(index)))
        self.tell(*events)

    def trouble(self) -> None:
        worker_id = self.rng.choice(WORKERS)
        worker = self.workers[worker_id]
        kind = self.rng.choice(["breaks", "refused", "restarts", "killed", "lost", "master"])
        events: list[Event] = []
        if kind == "master":  # another one, which knows nothing
            self.asks.clear()
            self.master_up = False
            self.tell(MasterDown())
            self.master_up = True
            events.append(MasterUp(2))
        if kind in ("restarts", "killed"):
            self.workers[worker_id] = ModelWorker(worker.epoch + 1)
        if kind not in ("lost", "master") and self.open.pop(worker_id, None) is not None:
            self.flying[worker_id].clear()
            events.append(StreamDown(worker_id, kind == "refused"))
        if kind in ("killed", "lost"):  # when only lost, its stream may be up
            events.append(From("master", WorkerLost(worker_id, worker.epoch)))
        self.tell(*events)

    def client(self) -> None:
        if not self.live():
            return
        request_id = RequestId(self.rng.choice(self.live()))
        match self.rng.randrange(5):
            case 0:
                self.ends[request_id] = "left"
                self.tell(ClientGone(request_id))
                assert request_id not in self.asks
            case 1 | 2:
                self.tell(ClientPaused(request_id))
            case _:
                self.tell(ClientReady(request_id))

    def wait(self) -> None:
        self.now += self.rng.choice([0.05, 0.25, 1.0])
        self.tell()

    def run(self, num_events: int) -> None:
        often = [self.grant, self.opened, self.step, self.arrive] * 5
        for _ in range(num_events):
            self.rng.choice(
                [*often, self.begin, self.trouble, self.trouble, self.client, self.wait]
            )()

    # ------------------------------------------------------------ what must hold

    def settle(self) -> None:
        """Trouble ends: so does every request, with all its text."""
        for _ in range(1000):
            if not self.live() and not self.zombies():
                break
            for request_id in self.live():
                self.tell(ClientReady(RequestId(request_id)))
            self.opened(fail=0.0)
            self.grant()
            self.step()
            self.arrive(disorder=0.0)
            if self.live() and not self.asks:
                self.now += 0.1  # pauses between attempts end
                self.tell()
        assert not self.live()
        assert not self.zombies()
        assert self.frontend.idle()
        assert self.frontend.next_deadline() is None
        for request_id, end in self.ends.items():
            if end != "left":
                assert end == "Ended"
                for choice in range(self.n[request_id]):
                    self.check_output((request_id, choice))

    def zombies(self) -> list[str]:
        """What runs on workers that the frontend is connected to."""
        return [r for worker_id in self.open for r in self.workers[worker_id].running]

    def check_output(self, output: Output) -> None:
        text = "".join(chr(letter(*output, i)) for i in range(MAX_TOKENS))
        stop = text.find(STOP) if self.stops[output[0]] else -1
        assert self.text[output] == (text if stop < 0 else text[:stop])
        assert len(self.ids[output]) == (MAX_TOKENS if stop < 0 else stop + len(STOP))
        assert self.finish[output] == ("length" if stop < 0 else "stop")


def run_seeds(seeds: range, num_events: int) -> Counters:
    """Returns what all frontends counted together."""
    total = Counters()
    for seed in seeds:
        world = World(seed)
        try:
            world.run(num_events)
            world.settle()
        except Exception as error:
            error.add_note(f"run_seeds(range({seed}, {seed + 1}), {num_events})")
            raise
        for field in fields(Counters):
            more = getattr(world.frontend.counters, field.name)
            setattr(total, field.name, getattr(total, field.name) + more)
    return total


def test_each_request_ends_once_with_exactly_its_tokens() -> None:
    total = run_seeds(range(100), 300)
    assert min(total.resumes, total.gaps, total.duplicates, total.reconnects) > 50
    assert total.failed == 0


@pytest.mark.slow
def test_each_request_ends_once_with_exactly_its_tokens_at_length() -> None:
    run_seeds(range(1000, 2500), 300)

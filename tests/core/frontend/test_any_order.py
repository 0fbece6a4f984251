"""A frontend in any order of events: grants, tokens repeated and out of order, streams that break,
workers that die or restart, clients that pause or leave. Each request ends exactly once, and what
its client got is exactly what the workers' rule generates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
from rtp.core.messages import (
    Ack,
    Ask,
    Cancel,
    Grant,
    Rejected,
    Submit,
    TokenRun,
    Tokens,
    WorkerLost,
)
from rtp.core.types import RequestId, WorkerId, unpack_ids
from tests.core.frontend.support import FIRST, SECOND, a_begin, a_frontend

WORKERS = (FIRST, SECOND)
MAX_TOKENS = 12
STOP = "cab"


def letter(request_id: str, choice: int, index: int) -> int:
    """The rule that every worker generates by; some streams contain STOP."""
    number = int(request_id) * 7 + choice * 3
    return ord("abc"[(number + index * (1 + number % 2)) % 3])


def whole(request_id: str, choice: int) -> str:
    return "".join(chr(letter(request_id, choice, i)) for i in range(MAX_TOKENS))


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

    def runs(self, request_id: str) -> list[TokenRun]:
        """Everything not acknowledged."""
        attempt, spans = self.running[request_id]
        return [
            TokenRun(
                RequestId(request_id),
                attempt,
                choice,
                first,
                tuple(letter(request_id, choice, i) for i in range(first, end)),
                finish="length" if end == MAX_TOKENS else "",
            )
            for choice, (first, end) in spans.items()
            if end > first or end == MAX_TOKENS
        ]

    def ack(self, message: Ack) -> None:
        for item in message.items:
            attempt, spans = self.running.get(item.request_id, (0, {}))
            if attempt == item.attempt and item.choice in spans:
                if item.stop or item.next_index < 0:
                    del spans[item.choice]
                else:
                    spans[item.choice][0] = item.next_index

    def cancel(self, message: Cancel) -> None:
        self.dead[message.request_id] = max(self.dead.get(message.request_id, 0), message.attempt)
        if self.running.get(message.request_id, (0,))[0] <= message.attempt:
            self.running.pop(message.request_id, None)


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.frontend = a_frontend(max_replacements=10_000)
        self.now = 0.0
        self.asks: dict[str, Ask] = {}
        self.workers = {worker_id: ModelWorker(1) for worker_id in WORKERS}
        self.open: dict[WorkerId, int] = {}  # epoch of the stream that is up
        self.opening: dict[WorkerId, list[Connect | Send]] = {}
        self.flying: dict[WorkerId, list[Tokens | Rejected]] = defaultdict(list)
        self.master_up = True
        self.num_begun = 0
        self.num_grants = 0
        self.got: dict[str, dict[int, str]] = defaultdict(lambda: defaultdict(str))
        self.ids: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.finish: dict[tuple[str, int], str] = {}
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
                if WorkerId(peer) in self.opening:
                    self.opening[WorkerId(peer)].append(command)
                else:
                    self.to_worker(WorkerId(peer), message)
            case Connect(worker_id=worker_id):
                self.open.pop(worker_id, None)
                self.flying[worker_id].clear()
                self.opening[worker_id] = [command]
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
        if isinstance(message, Ask):
            known = self.asks.get(message.request_id)
            assert known is None or message.attempt >= known.attempt
            self.asks[message.request_id] = message
        else:
            assert isinstance(message, Cancel)
            ask = self.asks.get(message.request_id)
            if ask is not None and ask.attempt <= message.attempt:
                del self.asks[message.request_id]

    def to_worker(self, worker_id: WorkerId, message: object) -> None:
        worker = self.workers[worker_id]
        if self.open.get(worker_id) != worker.epoch:
            return
        match message:
            case Submit():
                refusal = worker.submit(message)
                if refusal is not None:
                    self.flying[worker_id].append(refusal)
                else:
                    self.replay(worker_id, message.request_id)
            case Ack():
                worker.ack(message)
            case Cancel():
                worker.cancel(message)

    def replay(self, worker_id: WorkerId, request_id: str) -> None:
        runs = self.workers[worker_id].runs(request_id)
        if runs:
            self.flying[worker_id].append(Tokens(tuple(runs)))

    def deliver(self, command: Deliver) -> None:
        request_id = command.request_id
        assert request_id not in self.ends
        for chunk in command.chunks:
            assert (request_id, chunk.choice) not in self.finish
            assert chunk.text or chunk.ids or chunk.finish
            self.got[request_id][chunk.choice] += chunk.text
            self.ids[request_id][chunk.choice] += chunk.ids
            if chunk.finish:
                self.finish[request_id, chunk.choice] = chunk.finish
        total = sum(len(ids) for ids in self.ids[request_id].values())
        assert command.generated == total

    def live(self) -> list[str]:
        return [request_id for request_id in self.n if request_id not in self.ends]

    # ------------------------------------------------------------ what may happen

    @initialize()
    def two_run(self) -> None:
        self.begin(1, True)
        self.begin(2, False)
        self.flow(FIRST, 1)
        self.flow(SECOND, 1)

    @rule(n=st.integers(1, 2), stop=st.booleans())
    def begin(self, n: int, stop: bool) -> None:
        request_id = str(self.num_begun)
        self.num_begun += 1
        self.n[request_id], self.stops[request_id] = n, stop
        stops = (STOP,) if stop else ()
        self.tell(a_begin(request_id, n=n, stop=stops, max_tokens=MAX_TOKENS, timeout_s=1e9))

    @precondition(lambda self: self.asks)
    @rule(pick=st.integers(0, 9), worker_id=st.sampled_from(WORKERS), keep=st.booleans())
    def grant(self, pick: int, worker_id: WorkerId, keep: bool) -> None:
        """keep: the same Ask may be granted once more, as after a repeat."""
        ask = list(self.asks.values())[pick % len(self.asks)]
        if not keep:
            del self.asks[ask.request_id]
        epoch = self.workers[worker_id].epoch
        number = self.num_grants
        self.num_grants += 1
        self.tell(
            From(
                "master",
                Grant(ask.request_id, ask.attempt, number, worker_id, epoch, "a:1", 0, 0, 0.25),
            )
        )

    @rule(worker_id=st.sampled_from(WORKERS), refused=st.booleans(), fail=st.booleans())
    def opened(self, worker_id: WorkerId, refused: bool, fail: bool) -> None:
        if worker_id not in self.opening:
            return
        connect, *waiting = self.opening.pop(worker_id)
        assert isinstance(connect, Connect)
        if fail or connect.epoch != self.workers[worker_id].epoch:
            self.tell(StreamDown(worker_id, refused))
            return
        self.open[worker_id] = connect.epoch
        for send in waiting:
            assert isinstance(send, Send)
            self.to_worker(worker_id, send.message)
        self.tell(StreamUp(worker_id, connect.epoch))

    @rule(worker_id=st.sampled_from(WORKERS), count=st.integers(1, 4))
    def step(self, worker_id: WorkerId, count: int) -> None:
        """Generates for every choice; what is sent over a broken stream is lost."""
        worker = self.workers[worker_id]
        runs = []
        for request_id, (attempt, spans) in worker.running.items():
            for choice, span in spans.items():
                first, span[1] = span[1], min(span[1] + count, MAX_TOKENS)
                ids = tuple(letter(request_id, choice, i) for i in range(first, span[1]))
                finish = "length" if span[1] == MAX_TOKENS else ""
                if ids:
                    runs.append(
                        TokenRun(RequestId(request_id), attempt, choice, first, ids, finish=finish)
                    )
        if runs and self.open.get(worker_id) == worker.epoch:
            self.flying[worker_id].append(Tokens(tuple(runs)))

    @rule(
        worker_id=st.sampled_from(WORKERS),
        pick=st.integers(0, 2),
        again=st.booleans(),
        many=st.booleans(),
    )
    def arrive(self, worker_id: WorkerId, pick: int, again: bool, many: bool) -> None:
        """A frame, perhaps not the first; perhaps it comes a second time later."""
        frames = self.flying[worker_id]
        if not frames:
            return
        events: list[Event] = []
        for _ in range(3 if many else 1):
            if frames:
                index = pick % len(frames)
                events.append(From(worker_id, frames[index] if again else frames.pop(index)))
        self.tell(*events)

    @rule(worker_id=st.sampled_from(WORKERS), count=st.integers(1, 4))
    def flow(self, worker_id: WorkerId, count: int) -> None:
        """What happens when nothing goes wrong."""
        self.opened(worker_id, refused=False, fail=False)
        if self.asks:
            self.grant(0, worker_id, keep=False)
        self.step(worker_id, count)
        self.arrive(worker_id, 0, again=False, many=True)

    @rule(
        worker_id=st.sampled_from(WORKERS),
        trouble=st.sampled_from(["breaks", "refused", "restart", "killed", "lost", "master"]),
    )
    def trouble(self, worker_id: WorkerId, trouble: str) -> None:
        worker = self.workers[worker_id]
        events: list[Event] = []
        if trouble == "master":  # another Master, which knows nothing
            self.asks.clear()
            self.master_up = False
            self.tell(MasterDown())
            self.master_up = True
            events.append(MasterUp(2))
        if trouble in ("restart", "killed"):
            self.workers[worker_id] = ModelWorker(worker.epoch + 1)
        if trouble not in ("lost", "master") and self.open.pop(worker_id, None) is not None:
            self.flying[worker_id].clear()
            events.append(StreamDown(worker_id, trouble == "refused"))
        if trouble in ("killed", "lost"):  # when only "lost", its stream may be up
            events.append(From("master", WorkerLost(worker_id, worker.epoch)))
        self.tell(*events)

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 9), what=st.sampled_from([ClientPaused, ClientReady, ClientGone]))
    def client(self, pick: int, what: Callable[[RequestId], Event]) -> None:
        request_id = self.live()[pick % len(self.live())]
        if what is ClientGone:
            self.ends[request_id] = "left"
        self.tell(what(RequestId(request_id)))
        if what is ClientGone:
            assert request_id not in self.asks

    @rule(seconds=st.sampled_from([0.1, 0.25, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell()

    # ------------------------------------------------------------ what must hold

    @invariant()
    def delivered_is_a_prefix_of_the_rule(self) -> None:
        for request_id, choices in self.ids.items():
            for choice, ids in choices.items():
                assert ids == [letter(request_id, choice, i) for i in range(len(ids))]

    def teardown(self) -> None:
        """Trouble ends: so does every request, with all its text."""
        for _ in range(200):
            if not self.live():
                break
            for request_id in self.live():
                self.tell(ClientReady(RequestId(request_id)))
            for worker_id in WORKERS:
                self.opened(worker_id, refused=True, fail=False)
            for pick in range(len(self.asks)):
                self.grant(0, WORKERS[pick % 2], keep=False)
            for worker_id in WORKERS:
                self.step(worker_id, 4)
                while self.flying[worker_id]:
                    self.arrive(worker_id, 0, again=False, many=False)
        assert not self.live()
        assert self.frontend.idle()
        assert self.frontend.next_deadline() is None
        for request_id, end in self.ends.items():
            if end != "left":
                assert end == "Ended"
                for choice in range(self.n[request_id]):
                    self.check_text(request_id, choice)

    def check_text(self, request_id: str, choice: int) -> None:
        text = whole(request_id, choice)
        stop = text.find(STOP) if self.stops[request_id] else -1
        expected = text if stop < 0 else text[:stop]
        ids = MAX_TOKENS if stop < 0 else stop + len(STOP)
        assert self.got[request_id][choice] == expected
        assert len(self.ids[request_id][choice]) == ids
        assert self.finish[request_id, choice] == ("length" if stop < 0 else "stop")


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase

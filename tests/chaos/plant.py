"""The processes of a simulated cluster: started by a scenario's shape, killed, started again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from random import Random
from types import ModuleType

from rtp.backends import sim
from rtp.core import plugins
from rtp.core.commands import Command, Send
from rtp.core.events import Event, From
from rtp.core.frontend.frontend import Frontend
from rtp.core.master.master import Master
from rtp.core.master.tenants import Tenants
from rtp.core.messages import AnyMessage, Delta, Fence, Now, Poll, Snapshot, Source, Status
from rtp.core.policy import Routing
from rtp.core.ports import Runner
from rtp.core.steps import StepPlan, StepResult
from rtp.core.types import FrontendId, WorkerId
from rtp.core.virtual import VirtualCluster
from rtp.core.virtual_time import Process
from rtp.core.worker.worker import Worker
from tests.chaos.callers import Caller
from tests.chaos.network import FaultyNetwork
from tests.chaos.policies import Misbehaving
from tests.chaos.scenario import (
    EOS,
    MAX_MODEL_LEN,
    MISBEHAVING,
    VOCAB_SIZE,
    Call,
    Scenario,
)
from tests.support.cluster import a_register
from tests.support.oracles import Signs

MAX_RANKS = 32
KEPT_PLACEMENTS = 8
AFFINITY_CHATS = 3
CALLER = FrontendId("caller")
FRAMES_KEPT = 400
TOKENS_PER_S = 1e5
"""Of a pull."""
GRACE_S = 2.0
"""Of Masters whose frontends outlive them."""


class UnsteadyRunner:
    """A Runner some of whose steps take a hundred times as long.  hangs: share of them by now."""

    def __init__(self, inner: Runner, hangs: Callable[[], float], random: Random) -> None:
        self.capacity = inner.capacity
        self._inner = inner
        self._hangs = hangs
        self._random = random

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._inner.execute(plan)
        if self._random.random() < self._hangs():
            return StepResult(result.step, result.rows, 100 * result.elapsed_s)
        return result

    def close(self) -> None:
        self._inner.close()


class UnsteadyTransport:
    """Some of its pulls take for ever.  fails: asked for each."""

    tokens_per_s = TOKENS_PER_S

    def __init__(self, transfer_s: float, fails: Callable[[], bool]) -> None:
        self._transfer_s = transfer_s
        self._fails = fails

    @property
    def latency_s(self) -> float:
        return inf if self._fails() else self._transfer_s

    async def pull(self, source: Source, start: int, num_tokens: int, pages: bytes) -> None:
        raise NotImplementedError("virtual time asks for the latency only")


@dataclass(frozen=True, slots=True)
class Frame:
    """A message between Master and worker that was sent once."""

    source: str
    target: str
    epoch: int
    """The worker's life."""
    message: AnyMessage


class Plant:
    """`world` with a Master, frontends f0 .. and workers w0 .., each in its present life."""

    def __init__(
        self,
        scenario: Scenario,
        observe: Callable[[Process, Command], None],
        after: Callable[[Process, Event], None],
    ) -> None:
        self.shape = scenario.shape
        self.calls = scenario.calls
        self.reports: deque[Frame] = deque(maxlen=FRAMES_KEPT)
        """Of workers."""
        self.orders: deque[Frame] = deque(maxlen=FRAMES_KEPT)
        """Of Masters."""
        self.asks_workers = False
        """New Masters know the workers' addresses and ask them to register."""
        random = Random(f"{scenario.seed} network and runners")
        self.network = FaultyNetwork(scenario.trouble, random, lambda: self.world.now)
        self.world = VirtualCluster(self.network, observe=observe, after=after)
        self._random = random
        self._skews = list(scenario.skews)
        self._hangs = scenario.shape.hang
        self._calm = False
        self._term = 0
        self._epochs: dict[WorkerId, int] = {}

    @property
    def master(self) -> Process:
        assert self.world.master is not None
        return self.world.master

    @property
    def processes(self) -> list[Process]:
        return [self.master, *self.world.frontends.values(), *self.world.workers.values()]

    def keep(self, process: Process, command: Command) -> None:
        """Remembers what may come late."""
        match command:
            case Send("master", Status() | Now() | Delta() | Snapshot() as message):
                frame = Frame(process.name, "master", message.epoch, message)
                self.reports.append(frame)
            case Send(peer, Poll() | Fence() as message) if peer in self.world.workers:
                register = self.world.workers[peer].register
                assert register is not None
                self.orders.append(Frame("master", peer, register.epoch, message))

    def start(self) -> None:
        self.start_master()
        for index in range(self.shape.workers):
            self.start_worker(WorkerId(f"w{index}"))
        if self.calls:
            self.start_caller(self.calls)

    def calm(self) -> None:
        """From now on nothing goes wrong by itself; what stands still goes on."""
        self.network.calm()
        self._hangs = 0.0
        self._calm = True
        for process in self.processes:
            self.resume(process)

    def start_master(self) -> None:
        """The next Master, with the frontend that lives in its process, or the first ones."""
        first = self._term == 0
        self._term += 1
        routing = self.shape.routing
        terms = self.shape.terms
        core = Master(
            self._term,
            _policy(routing),
            tenants=None if terms is None else Tenants({"t": terms}),
            max_ranks=MAX_RANKS,
            kept_placements=KEPT_PLACEMENTS,
            affinity_chats=AFFINITY_CHATS,
            grace_s=0.0 if self.shape.with_master else GRACE_S,
        )
        self.world.add_master(core, term=self._term, skew_s=self._skew())
        for worker in self.world.workers.values() if self.asks_workers else ():
            if worker.alive and worker.register is not None:
                self.world.tell(self.master, From(worker.name, worker.register))
        if first or self.shape.with_master:
            for index in range(self.shape.frontends):
                self.start_frontend(FrontendId(f"f{index}"))

    def start_caller(self, calls: Sequence[Call]) -> None:
        """Whoever asks for places only; it outlives every Master."""
        self.world.add_frontend(CALLER, Caller(CALLER, calls), skew_s=self._skew())
        del self.world.frontends[CALLER]  # nothing befalls it

    def start_frontend(self, name: FrontendId) -> None:
        core = Frontend(name, lambda model, skip: Signs())
        together = self.shape.with_master
        skew_s = self.master.skew_s if together else self._skew()
        self.world.add_frontend(name, core, skew_s=skew_s, with_master=together)

    def start_worker(self, worker_id: WorkerId) -> None:
        shape = self.shape
        epoch = self._epochs[worker_id] = self._epochs.get(worker_id, 0) + 1
        runners = [
            UnsteadyRunner(self._a_runner(), lambda: self._hangs, self._random)
            for _ in range(shape.ranks)
        ]
        card = a_register(
            worker_id,
            epoch,
            runners,
            profile=(),
            max_batch_tokens=shape.max_batch_tokens,
            lockstep=shape.lockstep,
            role=shape.roles[int(worker_id[1:]) % len(shape.roles)],
            transports=("sim",),
            transfer=(shape.transfer_s, TOKENS_PER_S),
        )
        core = Worker(
            card,
            [runner.capacity for runner in runners],
            max_batch_tokens=shape.max_batch_tokens,
            chunk_while_decoding=shape.chunk_while_decoding,
            max_rows=shape.max_rows,
            steps_in_flight=shape.steps_in_flight,
            max_unacked=shape.max_unacked,
            max_attempts=shape.max_attempts,
        )
        failing = partial(self._fails, shape.transfers_fail)
        transport = UnsteadyTransport(shape.transfer_s, failing)
        self.world.add_worker(card, core, runners, skew_s=self._skew(), transport=transport)

    def restart_worker(self, worker: Process, after_s: float) -> None:
        """kill -9, and a new life some time later."""
        if worker.alive:
            self.world.kill(worker)
            again = self.world.now + after_s
            self.world.call(again, lambda: self.start_worker(WorkerId(worker.name)))

    def pause(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT some time later."""
        if process.alive and not process.paused:
            self.world.pause(process)
            self.world.call(self.world.now + seconds, lambda: self.resume(process))

    def resume(self, process: Process) -> None:
        if process.alive and process.paused:
            self.world.resume(process)

    def _a_runner(self) -> Runner:
        shape = self.shape
        return sim.build(
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_ids=(EOS,),
            eos_every=shape.eos_every,
            a=shape.step_s / 2,
            b=shape.step_s / 50,
            c=0.0,
            d=shape.step_s,
            e=shape.step_s / 20,
            f=0.0,
        )

    def _fails(self, share: float) -> bool:
        return not self._calm and share > 0 and self._random.random() < share

    def _skew(self) -> float:
        return self._skews.pop() if self._skews else 0.0


def _policy(name: str) -> Routing:
    if name == MISBEHAVING:
        return Misbehaving()
    module = _module(name)
    policy: Routing = module.build(seed=1) if name == "random" else module.build()
    return policy


@cache
def _module(name: str) -> ModuleType:
    """Looked up once: entry points are files."""
    return plugins.module("routing", name)

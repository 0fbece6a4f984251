"""One seed: three cores, their connections and troubles in virtual time, watched throughout.

Sim Runners read every token of a sequence's pages, so a page that was shared wrongly, freed too
early or never written changes the output, and with it what the witness sees.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

import msgspec

from rtp.backends import sim
from rtp.core import plugins
from rtp.core.commands import Command
from rtp.core.events import (
    ClientGone,
    ClientPaused,
    ClientReady,
    Drain,
    Event,
    From,
    RunnerFailed,
    Tick,
)
from rtp.core.frontend.frontend import Frontend
from rtp.core.hashing import low64
from rtp.core.master.master import Master
from rtp.core.ports import Runner
from rtp.core.steps import StepPlan, StepResult
from rtp.core.types import FrontendId, RequestId, Tier, WorkerId
from rtp.core.virtual import VirtualCluster
from rtp.core.virtual_time import Process
from rtp.core.worker.worker import Worker
from tests.chaos.network import FaultyNetwork, Partition
from tests.chaos.scenario import (
    CALM_AT_S,
    EOS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Client,
    Fault,
    make_scenario,
)
from tests.chaos.witness import Run, Witness
from tests.support.cluster import a_register
from tests.support.oracles import Signs

START_S = 0.5
"""Workers join before the first request comes."""
LAST_DEADLINE_S = START_S + CALM_AT_S + 20.0
"""A request's time starts when its frontend, which may be paused, hears of it."""
RECOVERED_S = 8.0
"""So long after the troubles end everything is as if there had been none."""
QUIET_S = 16.0
"""After the last deadline: longer than a worker keeps what a vanished frontend left behind."""
CHECK_MASTER_EVERY = 16
MOST_EVENTS = 100_000
MAX_RANKS = 32
KEPT_PLACEMENTS = 8
AFFINITY_CHATS = 3


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


class Simulation:
    """run() raises AssertionError, or whatever a core raises, where something is wrong."""

    def __init__(self, seed: int) -> None:
        self.scenario = make_scenario(seed)
        self.witness = Witness(self.scenario.calm, self._well_by())
        self.num_events = 0
        self._random = Random(f"{seed} network and runners")
        self.network = FaultyNetwork(self.scenario.trouble, self._random, lambda: self.world.now)
        self.world = VirtualCluster(self.network, observe=self._observe, after=self._after)
        self._skews = list(self.scenario.skews)
        self._hangs = self.scenario.shape.hang
        self._term = 0
        self._epochs: dict[WorkerId, int] = {}
        self._served_by: dict[RequestId, Process] = {}

    def run(self) -> Simulation:
        shape = self.scenario.shape
        self._start_master()
        for index in range(shape.workers):
            self._start_worker(WorkerId(f"w{index}"))
        for number, client in enumerate(self.scenario.clients):
            self._plan_client(RequestId(f"r{number}"), client)
        for fault in self.scenario.faults:
            self.world.call(START_S + fault.at, self._befall(fault))
        self.world.call(START_S + CALM_AT_S, self._calm)
        self.world.run(LAST_DEADLINE_S + 1.0)
        assert not self.witness.open_runs(), f"never ended: {self.witness.open_runs()}"
        self.world.run(LAST_DEADLINE_S + QUIET_S)
        self._check_quiet()
        return self

    def _well_by(self) -> float:
        """From when on no request may run out of time. A client that reads nothing for long keeps
        its reservation for as long, and others out."""
        slow = any(c.pauses is not None and c.pauses[1] > 1 for c in self.scenario.clients)
        busy = self.scenario.serial_s() > RECOVERED_S / 2
        return inf if slow or busy else START_S + CALM_AT_S + RECOVERED_S

    # ---------------------------------------------------------------- processes

    def _start_master(self) -> None:
        """The next Master, with the frontend that lives in its process, or the first ones."""
        first = self._term == 0
        self._term += 1
        routing = self.scenario.shape.routing
        policy = plugins.build("routing", routing, **({"seed": 1} if routing == "random" else {}))
        core = Master(
            self._term,
            policy,
            max_ranks=MAX_RANKS,
            kept_placements=KEPT_PLACEMENTS,
            affinity_chats=AFFINITY_CHATS,
        )
        self.world.add_master(core, term=self._term, skew_s=self._skew())
        if first or self.scenario.shape.with_master:
            for index in range(self.scenario.shape.frontends):
                self._start_frontend(FrontendId(f"f{index}"))

    def _start_frontend(self, name: FrontendId) -> None:
        core = Frontend(name, lambda model, skip: Signs())
        together = self.scenario.shape.with_master
        skew_s = self.master.skew_s if together else self._skew()
        self.world.add_frontend(name, core, skew_s=skew_s, with_master=together)

    def _start_worker(self, worker_id: WorkerId) -> None:
        shape = self.scenario.shape
        epoch = self._epochs[worker_id] = self._epochs.get(worker_id, 0) + 1
        runners = [
            UnsteadyRunner(self._a_runner(), lambda: self._hangs, self._random)
            for _ in range(shape.ranks)
        ]
        card = a_register(
            worker_id, epoch, runners, profile=(), max_batch_tokens=shape.max_batch_tokens
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
        self.world.add_worker(card, core, runners, skew_s=self._skew())

    def _a_runner(self) -> Runner:
        shape = self.scenario.shape
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

    def _skew(self) -> float:
        return self._skews.pop() if self._skews else 0.0

    @property
    def master(self) -> Process:
        assert self.world.master is not None
        return self.world.master

    # ---------------------------------------------------------------- clients

    def _plan_client(self, request_id: RequestId, client: Client) -> None:
        name = f"f{client.frontend % self.scenario.shape.frontends}"

        def begin() -> None:
            frontend = self.world.frontends[name]
            if not frontend.alive:
                return  # nobody answers the client's connection
            begin = client.planned.begin(request_id, self.scenario.shape.block_size)
            run = self.witness.begin(begin, client.expected, self.world.now)
            self._served_by[request_id] = frontend
            self.world.tell(frontend, begin)
            self._behave(run, client, frontend)

        self.world.call(START_S + client.planned.at, begin)

    def _behave(self, run: Run, client: Client, frontend: Process) -> None:
        outcome = run.outcome

        def tell(event: Event) -> None:
            if not (outcome.over or outcome.left or run.abandoned):
                outcome.left = isinstance(event, ClientGone)
                run.paused |= isinstance(event, ClientPaused)
                self.world.tell(frontend, event)

        now, request_id = self.world.now, outcome.request_id
        if client.leaves is not None:
            self.world.call(now + client.leaves, lambda: tell(ClientGone(request_id)))
        if client.pauses is not None:
            at, seconds = client.pauses
            self.world.call(now + at, lambda: tell(ClientPaused(request_id)))
            self.world.call(now + at + seconds, lambda: tell(ClientReady(request_id)))

    # ---------------------------------------------------------------- faults

    def _befall(self, fault: Fault) -> Any:  # Any: a function without arguments
        return lambda: getattr(self, f"_{fault.kind}")(fault)

    def _worker(self, fault: Fault) -> Process:
        workers = list(self.world.workers.values())
        return workers[fault.who % len(workers)]

    def _frontend(self, fault: Fault) -> Process:
        frontends = list(self.world.frontends.values())
        return frontends[fault.who % len(frontends)]

    def _kill_worker(self, fault: Fault) -> None:
        self._restart_worker(self._worker(fault), fault.seconds)

    def _restart_worker(self, worker: Process, after_s: float) -> None:
        """kill -9, and a new life some time later."""
        if worker.alive:
            self.world.kill(worker)
            again = self.world.now + after_s
            self.world.call(again, lambda: self._start_worker(WorkerId(worker.name)))

    def _pause_worker(self, fault: Fault) -> None:
        self._pause(self._worker(fault), fault.seconds)

    def _pause_master(self, fault: Fault) -> None:
        self._pause(self.master, fault.seconds)
        if self.scenario.shape.with_master:
            self._pause(self._frontend(fault), fault.seconds)

    def _pause_frontend(self, fault: Fault) -> None:
        if self.scenario.shape.with_master:
            self._pause_master(fault)
        else:
            self._pause(self._frontend(fault), fault.seconds)

    def _pause(self, process: Process, seconds: float) -> None:
        if process.alive and not process.paused:
            self.world.pause(process)
            self.world.call(self.world.now + seconds, lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        if process.alive and process.paused:
            self.world.resume(process)

    def _drain_worker(self, fault: Fault) -> None:
        worker = self._worker(fault)
        grace_s = 0.0 if fault.hard else fault.seconds
        if worker.alive:
            self.world.tell(worker, Drain(grace_s))
            end = self.world.now + grace_s + 0.1
            self.world.call(end, lambda: self._restart_worker(worker, 0.5))

    def _fail_runner(self, fault: Fault) -> None:
        """The process of a Runner is gone; its worker says so for a while and then ends, too."""
        worker = self._worker(fault)
        if worker.alive:
            rank = fault.who % self.scenario.shape.ranks
            self.world.tell(worker, RunnerFailed(rank, "fault"))
            end = self.world.now + fault.seconds
            self.world.call(end, lambda: self._restart_worker(worker, 0.2))

    def _kill_master(self, fault: Fault) -> None:
        master = self.master
        if not master.alive:
            return
        self.world.kill(master)
        if self.scenario.shape.with_master:
            for frontend in self.world.frontends.values():
                self._end_frontend(frontend)
        self.world.call(self.world.now + min(fault.seconds, 2.0), self._start_master)

    def _kill_frontend(self, fault: Fault) -> None:
        if self.scenario.shape.with_master:
            self._kill_master(fault)
            return
        frontend = self._frontend(fault)
        if frontend.alive:
            self._end_frontend(frontend)
            again = self.world.now + fault.seconds
            self.world.call(again, lambda: self._start_frontend(FrontendId(frontend.name)))

    def _end_frontend(self, frontend: Process) -> None:
        self.world.kill(frontend)
        for run in self.witness.open_runs():
            if self._served_by[run.outcome.request_id] is frontend:
                run.abandoned = True

    def _cut(self, fault: Fault) -> None:
        connections = [
            connection
            for process in (self.master, *self.world.frontends.values())
            for connection in process.connections.values()
            if process.alive and connection.dialler is process and not connection.broken
        ]
        if connections:
            self.world.cut(connections[fault.who % len(connections)])

    def _partition(self, fault: Fault) -> None:
        names = ["master", *self.world.frontends, *self.world.workers]
        if self.scenario.shape.with_master:
            names.remove("f0")
        one = names[fault.who % len(names)]
        others = set(names) - {one}
        if fault.who % 3:
            others = set(sorted(others)[: 1 + fault.who % 2])
        until = min(self.world.now + fault.seconds, START_S + CALM_AT_S)
        self.network.partitions.append(Partition(until, one, frozenset(others), fault.hard))

    def _register_again(self, fault: Fault) -> None:
        """A registration arrives twice, or late: of this life or of the one before."""
        register = self._worker(fault).register
        assert register is not None
        if fault.hard and register.epoch > 1:
            register = msgspec.structs.replace(register, epoch=register.epoch - 1)
        if self.master.alive:
            self.world.tell(self.master, From(register.worker_id, register))

    def _calm(self) -> None:
        """From now on nothing more goes wrong."""
        self.network.calm()
        self._hangs = 0.0
        for process in self._processes():
            self._resume(process)

    # ---------------------------------------------------------------- watching

    def _processes(self) -> list[Process]:
        return [self.master, *self.world.frontends.values(), *self.world.workers.values()]

    def _observe(self, process: Process, command: Command) -> None:
        self.witness.observe(command, self.world.now)

    def _after(self, process: Process, event: Event) -> None:
        self.num_events += 1
        assert self.num_events < MOST_EVENTS, "processes talk without end"
        if isinstance(event, ClientGone):
            self.witness.runs[event.request_id].forgotten = True
        core = process.core
        if isinstance(core, Master):
            if self.num_events % CHECK_MASTER_EVERY == 0:
                core.check()
        elif isinstance(core, Frontend | Worker) and not isinstance(event, Tick):
            core.check()

    def _check_quiet(self) -> None:
        """Nothing is held for anybody, and the Master believes what is true."""
        master = self.master.core
        assert isinstance(master, Master)
        master.check()
        assert master.idle(), "the ledger is not zero"
        assert master.map.num_arriving() == 0
        assert len(master.affinity) <= AFFINITY_CHATS
        assert len(master.placements.last(100)) <= KEPT_PLACEMENTS
        assert {member.worker_id for member in master.fleet.members} == set(self.world.workers)
        for frontend in self.world.frontends.values():
            assert isinstance(frontend.core, Frontend)
            frontend.core.check()
            assert frontend.core.idle()
        for name, process in self.world.workers.items():
            assert isinstance(process.core, Worker)
            process.core.check()
            assert process.core.idle(), f"{name} holds something"
            self._check_view(master, WorkerId(name), process)

    def _check_view(self, master: Master, worker_id: WorkerId, process: Process) -> None:
        """What the Master believes of a worker: alive, empty, and these keys."""
        member = master.fleet.members.get(worker_id)
        worker = process.core
        assert isinstance(worker, Worker)
        assert member is not None
        assert process.register is not None
        assert member.register.epoch == process.register.epoch
        assert member.usable, f"{worker_id} is {member.state}"
        for rank, row in enumerate(member.rows.tolist()):
            keys = worker._ranks[rank].batcher.blocks.keys()
            assert sorted(low64(b"".join(keys))) == master.map.keys(row, Tier.DEVICE)
            reported = master.ranks.reported[:, row]
            total = self.scenario.shape.num_blocks * self.scenario.shape.block_size
            assert reported[:5].tolist() == [0, 0, 0, 0, 0], "load is reported where none is"
            assert reported[5:7].tolist() == [total, total]

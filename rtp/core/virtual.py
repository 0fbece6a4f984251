"""A cluster in virtual time: one Master, frontends and workers without a thread, socket or clock.

Turns are virtual_time's; this file is what lies between the cores: Runners that take their
`elapsed_s`, and connections that behave as those of io do: in order, broken as a whole, replaced by
a newer one of the same peer without a word to the side that replaces. Workers without a link
register, frontends without a Master look for one. What the network does is asked of a Network;
nothing here is random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rtp.core.commands import Command, Connect, Dial, HangUp, Pull, RunStep, Send
from rtp.core.events import (
    Event,
    From,
    FrontendDown,
    FrontendUp,
    LinkDown,
    LinkUp,
    MasterDown,
    MasterUp,
    Pulled,
    StepDone,
    StreamDown,
    StreamUp,
)
from rtp.core.messages import AnyMessage, Register
from rtp.core.ports import Runner, Transport
from rtp.core.steps import StepPlan
from rtp.core.types import FrontendId, WorkerId
from rtp.core.virtual_time import Connection, Core, Process, VirtualTime
from rtp.core.worker.worker import Worker

MASTER = "master"
HANDSHAKE_S = 3.0
"""A dial that nobody answers fails after this time."""
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 0.5
"""Backoff of workers that register and frontends that look for the Master."""


class Network:
    """How long a message takes between two processes; this one is never in trouble."""

    def __init__(self, latency_s: float = 0.0002) -> None:
        self.latency_s = latency_s

    def delay_s(self, source: str, target: str) -> float | None:
        """Of one message sent now; None: it cannot pass, and its connection breaks."""
        return self.latency_s

    def notice_s(self) -> float:
        """How long one end of a connection that broke takes to notice."""
        return 0.0


class VirtualCluster:
    """The processes, their connections and their time.

    observe(process, command): told of every command before it is carried out.
    after(process, event): told of every event that a core has handled.
    """

    def __init__(
        self,
        network: Network | None = None,
        *,
        observe: Callable[[Process, Command], None] | None = None,
        after: Callable[[Process, Event], None] | None = None,
    ) -> None:
        self.network = network or Network()
        self.master: Process | None = None
        self.frontends: dict[str, Process] = {}
        self.workers: dict[str, Process] = {}
        """The present life of each worker."""
        self._observe = observe
        self._time = VirtualTime(self._perform, after)
        self._at_address: dict[str, Process] = {}
        self._with_master: set[str] = {MASTER}
        self._num_processes = 0

    @property
    def now(self) -> float:
        return self._time.now

    # ---------------------------------------------------------------- processes

    def add_master(self, core: Core, *, term: int = 1, skew_s: float = 0.0) -> Process:
        """Starts the Master, or the next one after a kill."""
        self.master = self._start(MASTER, core, skew_s)
        self.master.term = term
        return self.master

    def add_frontend(
        self, name: FrontendId, core: Core, *, skew_s: float = 0.0, with_master: bool = False
    ) -> Process:
        """A frontend; it finds the Master by itself. with_master: they share a process, what they
        tell each other takes no time."""
        process = self.frontends[name] = self._start(name, core, skew_s)
        if with_master:
            self._with_master.add(name)
        self._seek(process)
        return process

    def add_worker(
        self,
        register: Register,
        core: Core,
        runners: Sequence[Runner],
        *,
        skew_s: float = 0.0,
        transport: Transport | None = None,
    ) -> Process:
        """A worker, or its next life after a kill (`register.epoch`). It registers by itself.
        transport: for its times; what it would move is not."""
        process = self._start(register.worker_id, core, skew_s)
        process.register = register
        process.runners = runners
        process.transport = transport
        process.free_at = [0.0] * len(runners)
        self.workers[register.worker_id] = process
        self._at_address[register.address] = process
        self._seek(process)
        return process

    def kill(self, process: Process) -> None:
        """The process is gone with all its state; its peers see their connections close."""
        process.alive = False
        for connection in process.connections.values():
            self._close(connection, process)

    def pause(self, process: Process) -> None:
        """The process stands still and its connections stay; what reaches it waits (SIGSTOP)."""
        process.paused = True

    def resume(self, process: Process) -> None:
        self._time.resume(process)

    def cut(self, connection: Connection) -> None:
        """Breaks a connection and loses what is on the way; until an end notices, it sends into the
        void."""
        connection.broken = True
        for end in (connection.dialler, connection.acceptor):
            if end is not None:
                self._tell_down(connection, end, self.network.notice_s())

    def _start(self, name: str, core: Core, skew_s: float) -> Process:
        self._num_processes += 1
        return Process(name, core, self._num_processes, skew_s)

    # ---------------------------------------------------------------- time

    def tell(self, process: Process, event: Event, at: float | None = None) -> None:
        """A local event (Begin, ClientGone, Drain, ...), now or later."""
        self._time.push(self.now if at is None else at, process, event)

    def call(self, at: float, function: Callable[[], None]) -> None:
        """Calls the function at that time, as part of the input of its instant."""
        self._time.push(at, None, function)

    def run(self, until: float) -> None:
        """Lets time pass."""
        self._time.run(until)

    def run_while(self, condition: Callable[[], bool], until: float = math.inf) -> None:
        """Lets time pass, turn by turn, while the condition holds."""
        self._time.run_while(condition, until)

    # ---------------------------------------------------------------- commands

    def _perform(self, process: Process, command: Command) -> None:
        if self._observe is not None:
            self._observe(process, command)
        match command:
            case Send():
                self._send(process, command.peer, command.message)
            case RunStep():
                self._run_step(process, command.rank, command.plan)
            case Pull():
                self._pull(process, command)
            case Dial() | Connect():
                self._dial(process, command.worker_id, command.epoch, command.address)
            case HangUp():
                connection = process.connections.get(command.worker_id)
                if connection is not None and connection.epoch == command.epoch:
                    self._drop(process, command.worker_id)

    def _run_step(self, process: Process, rank: int, plan: StepPlan) -> None:
        """A rank's steps run one after the other. Ranks that step together begin each when all are
        through with the one before, which costs them the wait for the slowest."""
        result = process.runners[rank].execute(plan)
        start = max(self.now, process.free_at[rank])
        assert process.register is not None
        if process.register.lockstep:
            ends = process.step_ends
            start = max(start, ends.get(plan.step - 1, 0.0))
            ends[plan.step] = max(ends.get(plan.step, 0.0), start + result.elapsed_s)
            ends.pop(plan.step - 2, None)
        process.free_at[rank] = start + result.elapsed_s
        self._time.push(process.free_at[rank], process, StepDone(rank, result))

    def _send(self, process: Process, peer: str, message: AnyMessage) -> None:
        connection = process.connections.get(peer)
        if connection is None or connection.broken:
            return
        if connection.opening and process is connection.dialler:
            if process.name != MASTER:  # only streams keep what is sent before they are open
                connection.unsent.append(message)
            return
        to = connection.other(process)
        if to is None or not connection.up.get(process):
            return
        delay = self._delay(process.name, to.name)
        if delay is None:
            self.cut(connection)
        elif to.alive:
            self._pass(connection, to, From(process.name, message), delay)

    def _delay(self, source: str, target: str) -> float | None:
        if source in self._with_master and target in self._with_master:
            return 0.0
        return self.network.delay_s(source, target)

    def _pull(self, process: Process, pull: Pull) -> None:
        """Takes the transport's time, if the source has the pages then and all that time."""
        source = self._at_address.get(pull.source.address)
        delay = self._delay(process.name, pull.source.worker_id)
        transport = process.transport
        seconds = pull.timeout_s
        if transport is not None and delay is not None and self._has(source, pull):
            seconds = transport.latency_s + pull.num_tokens / transport.tokens_per_s + 2 * delay
        in_time = seconds < pull.timeout_s

        def end() -> None:
            ok = in_time and self._has(source, pull)
            reason = "" if ok else "the pages did not come"
            self._time.handle(process, Pulled(pull.rank, pull.number, ok, reason))

        self._time.push(self.now + min(seconds, pull.timeout_s), process, end)

    def _has(self, source: Process | None, pull: Pull) -> bool:
        """Whether a worker could send the pages now."""
        if source is None or not source.alive or source.paused or source.register is None:
            return False
        core, this_life = source.core, source.register.epoch == pull.source.epoch
        assert isinstance(core, Worker)
        return this_life and core.handovers.holds(pull.source.ticket, pull.source.rank)

    # ---------------------------------------------------------------- connections

    def _dial(self, dialler: Process, peer: str, epoch: int, address: str) -> None:
        self._drop(dialler, peer)
        acceptor = self._at_address.get(address)
        connection = Connection(dialler, acceptor, peer, epoch)
        dialler.connections[peer] = connection
        now, delay = self.now, self._delay(dialler.name, peer)
        if delay is not None and acceptor is not None and acceptor.alive:
            self._time.push(now + delay, acceptor, lambda: self._accept(connection))
        elif delay is not None:
            self._time.push(now + 2 * delay, dialler, lambda: self._fail(connection, True))
        self._time.push(now + HANDSHAKE_S, dialler, lambda: self._fail(connection, False))

    def _accept(self, connection: Connection) -> None:
        """The dial reached its target: taken, or refused with an answer."""
        dialler, acceptor = connection.dialler, connection.acceptor
        if not connection.opening or connection.broken:
            return
        assert acceptor is not None
        delay = self._delay(acceptor.name, dialler.name)
        if delay is None:
            return
        register = acceptor.register
        assert register is not None
        this_life = (register.worker_id, register.epoch) == (connection.peer, connection.epoch)
        if not this_life or (dialler.name == MASTER and dialler.term < acceptor.term):
            self._time.push(self.now + delay, dialler, lambda: self._fail(connection, True))
            return
        earlier = acceptor.connections.get(dialler.name)
        if earlier is not None:
            self._drop(acceptor, dialler.name)
            self._time.handle(acceptor, _down(earlier, acceptor))
        acceptor.connections[dialler.name] = connection
        connection.up[acceptor] = True
        connection.last_s[dialler] = self.now + delay
        self._time.push(self.now + delay, dialler, lambda: self._open(connection))
        if dialler.name == MASTER:
            acceptor.term = dialler.term
            self._time.handle(acceptor, MasterUp(dialler.term))
        else:
            self._time.handle(acceptor, FrontendUp(FrontendId(dialler.name)))

    def _open(self, connection: Connection) -> None:
        """The answer reached the dialler."""
        if not connection.opening or connection.broken:
            return
        dialler = connection.dialler
        connection.opening = False
        connection.up[dialler] = True
        for message in connection.unsent:
            self._send(dialler, connection.peer, message)
        connection.unsent = []
        made = LinkUp if dialler.name == MASTER else StreamUp
        self._time.handle(dialler, made(WorkerId(connection.peer), connection.epoch))

    def _fail(self, connection: Connection, refused: bool) -> None:
        """The dialler learns that it was refused, or has waited long enough."""
        if not connection.opening:
            return
        dialler = connection.dialler
        self._drop(dialler, connection.peer)
        self._time.handle(dialler, _down(connection, dialler, refused))

    def _drop(self, process: Process, peer: str) -> None:
        """Closes this side's connection to the peer; no event follows here."""
        connection = process.connections.pop(peer, None)
        if connection is not None:
            self._close(connection, process)

    def _close(self, connection: Connection, end: Process) -> None:
        """`end` is through with it; the other end hears of it behind all that was sent before."""
        connection.up[end] = False
        if end is connection.dialler:
            connection.opening = False
        other = connection.other(end)
        if other is not None and other.alive and not connection.broken:
            delay = self._delay(end.name, other.name)
            self._tell_down(connection, other, HANDSHAKE_S if delay is None else delay)

    def _tell_down(self, connection: Connection, end: Process, delay: float) -> None:
        at = max(self.now + delay, connection.last_s.get(end, 0.0))
        self._time.push(at, end, lambda: self._went_down(connection, end))

    def _went_down(self, connection: Connection, end: Process) -> None:
        other = connection.other(end)
        assert other is not None
        if end.connections.get(other.name) is not connection:
            return
        del end.connections[other.name]
        connection.up[end] = connection.opening = False
        self._time.handle(end, _down(connection, end))
        if other.name == MASTER:
            self._seek(end)

    def _pass(self, connection: Connection, to: Process, event: Event, delay: float) -> None:
        """Order is kept: nothing overtakes what was sent before."""
        at = max(self.now + delay, connection.last_s.get(to, 0.0))
        connection.last_s[to] = at
        self._time.push(at, to, event, connection)

    # ---------------------------------------------------------------- finding the Master

    def _seek(self, process: Process) -> None:
        if not process.seeking:
            process.seeking = True
            self._try(process, FIRST_RETRY_S)

    def _try(self, process: Process, wait: float) -> None:
        """Registers, or connects a frontend, until there is a connection to a Master."""
        if MASTER in process.connections:
            process.seeking = False
            return
        master, delay = self.master, self._delay(process.name, MASTER)
        if master is not None and master.alive and delay is not None:
            if process.register is not None:
                self._time.push(self.now + delay, master, From(process.name, process.register))
            else:
                self._join(process, master, delay)
        again = min(2 * wait, LAST_RETRY_S)
        self._time.push(self.now + wait, process, lambda: self._try(process, again))

    def _join(self, frontend: Process, master: Process, delay: float) -> None:
        connection = Connection(frontend, master, MASTER, 0)
        connection.opening = False
        connection.up = {frontend: True, master: True}
        frontend.connections[MASTER] = master.connections[frontend.name] = connection
        self._pass(connection, master, FrontendUp(FrontendId(frontend.name)), delay)
        self._pass(connection, frontend, MasterUp(master.term), delay)


def _down(connection: Connection, end: Process, refused: bool = False) -> Event:
    """What `end` is told when the connection is no more."""
    other = connection.other(end)
    if end.name == MASTER:
        if connection.peer == MASTER:
            assert other is not None
            return FrontendDown(FrontendId(other.name))
        return LinkDown(WorkerId(connection.peer), connection.epoch, refused)
    if end is connection.dialler and connection.peer != MASTER:
        return StreamDown(WorkerId(connection.peer), refused)
    if connection.peer == MASTER or connection.dialler.name == MASTER:
        return MasterDown()
    return FrontendDown(FrontendId(connection.dialler.name))

"""The event heap of virtual time: processes that are told events in turns, and what is on the way.

The heap is ordered by (time, sequence). All input of one instant is delivered, then every core that
got some, or whose deadline is due, gets one Tick (protocol rule 1), in the order the processes were
started. So a run is a function of its input alone, and cores decide at the points at which they
would under the asyncio driver.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from rtp.core.commands import Command
from rtp.core.events import Event, Tick
from rtp.core.messages import AnyMessage, Register
from rtp.core.ports import Runner, Transport

TICK = Tick()
MAX_TURNS_AN_INSTANT = 1000


class Core(Protocol):
    """What Master, Frontend and Worker have in common."""

    def handle(self, event: Event, now: float) -> list[Command]: ...

    def next_deadline(self) -> float | None: ...


What = Event | Callable[[], None] | None
"""An event for the core, a function for the driver to call on its behalf, or None: time to wake."""


class Process:
    """One life of a core. `name` is what peers send to: "master", a worker or a frontend id."""

    def __init__(self, name: str, core: Core, order: int, skew_s: float) -> None:
        self.name = name
        self.core = core
        self.order = order
        self.skew_s = skew_s
        """Its clock minus the world's."""
        self.alive = True
        self.paused = False
        self.backlog: list[tuple[What, Connection | None]] = []
        """What reached it while it was paused."""
        self.wake_at: float | None = None
        self.connections: dict[str, Connection] = {}
        """By peer; the newest one of each."""
        self.seeking = False
        """A worker that registers until a link is up, a frontend that looks for the Master."""
        self.term = 0
        """A Master's own; a worker's is the highest it has seen."""
        self.register: Register | None = None
        self.runners: Sequence[Runner] = ()
        self.transport: Transport | None = None
        """A worker's way to the pages of others."""
        self.free_at: list[float] = []
        """When each Runner has run all that it was given."""
        self.step_ends: dict[int, float] = {}
        """Where ranks step together: when the slowest has run a step."""


class Connection:
    """A connection of `dialler` to the process at an address; each end learns its fate alone."""

    def __init__(self, dialler: Process, acceptor: Process | None, peer: str, epoch: int) -> None:
        self.dialler = dialler
        self.acceptor = acceptor
        self.peer = peer
        """Who was dialled, and which life of it."""
        self.epoch = epoch
        self.opening = True
        self.broken = False
        """Nothing passes any more, either way."""
        self.up: dict[Process, bool] = {}
        """Whether an end believes in it."""
        self.last_s: dict[Process, float] = {}
        """When the last thing sent to an end arrives: order is kept."""
        self.unsent: list[AnyMessage] = []
        """What the dialler sent before it was open."""

    def other(self, end: Process) -> Process | None:
        return self.acceptor if end is self.dialler else self.dialler


class VirtualTime:
    """Delivers events in turns.

    perform(process, command): carries out one command, after the core's state has moved.
    after(process, event): called after each event that a core handled and its commands.
    """

    def __init__(
        self,
        perform: Callable[[Process, Command], None],
        after: Callable[[Process, Event], None] | None = None,
    ) -> None:
        self.now = 0.0
        self._perform = perform
        self._after = after
        self._heap: list[tuple[float, int, Process | None, What, Connection | None]] = []
        self._sequence = 0
        self._touched: dict[Process, None] = {}
        self._turns_now = 0

    def push(
        self, at: float, process: Process | None, what: What, over: Connection | None = None
    ) -> None:
        """Something reaches a process at `at`, unless it is gone or the connection `over` which it
        comes has broken by then."""
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, process, what, over))

    def run(self, until: float) -> None:
        """Lets time pass."""
        while self._heap and self._heap[0][0] <= until:
            self._turn()
        self.now = max(self.now, until)

    def run_while(self, condition: Callable[[], bool], until: float = math.inf) -> None:
        """Lets time pass, turn by turn, while the condition holds."""
        while self._heap and self._heap[0][0] <= until and condition():
            self._turn()

    def handle(self, process: Process, event: Event) -> None:
        """Tells the core an event now, as part of this turn."""
        if event is not TICK:
            self._touched[process] = None
        for command in process.core.handle(event, self.now + process.skew_s):
            self._perform(process, command)
        if self._after is not None:
            self._after(process, event)

    def resume(self, process: Process) -> None:
        """A paused process goes on with what waits for it."""
        process.paused = False
        backlog, process.backlog = process.backlog, []
        for what, over in backlog:
            self.push(self.now, process, what, over)
        process.wake_at = self.now
        self.push(self.now, process, None)

    def _turn(self) -> None:
        heap = self._heap
        at = heap[0][0]
        self._turns_now = self._turns_now + 1 if at == self.now else 0
        if self._turns_now > MAX_TURNS_AN_INSTANT:
            names = ", ".join(process.name for process in self._touched)
            raise RuntimeError(f"time stands still at {at}: {names} always has something due")
        self.now = at
        touched = self._touched = {}
        while heap and heap[0][0] == at:
            _, _, process, what, over = heapq.heappop(heap)
            if process is None:
                assert callable(what)
                what()
            elif process.alive:
                self._reach(process, what, over)
        awake = sorted(touched, key=lambda process: process.order)
        for process in awake:
            if process.alive and not process.paused:
                self.handle(process, TICK)
                self._arm(process)

    def _reach(self, process: Process, what: What, over: Connection | None) -> None:
        if what is None:
            if process.wake_at == self.now and not process.paused:
                self._touched[process] = None
        elif process.paused:
            process.backlog.append((what, over))
        elif callable(what):
            what()
        elif over is None or (over.up.get(process) and not over.broken):
            self.handle(process, what)

    def _arm(self, process: Process) -> None:
        deadline = process.core.next_deadline()
        if deadline is None:
            process.wake_at = None
            return
        at = max(deadline - process.skew_s, self.now)
        while at + process.skew_s < deadline:  # rounded down, it would wake too early for ever
            at = math.nextafter(at, math.inf)
        if at != process.wake_at or at == self.now:
            process.wake_at = at
            self.push(at, process, None)

"""One seed: three cores, their connections and troubles in virtual time, watched throughout.

Sim Runners read every token of a sequence's pages, so a page that was shared wrongly, freed too
early or never written changes the output, and with it what the witness sees.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from math import inf

from rtp.core.commands import Command
from rtp.core.events import ClientGone, ClientPaused, ClientReady, Event
from rtp.core.types import RequestId
from rtp.core.virtual_time import Process
from tests.chaos.checks import Checks
from tests.chaos.faults import Faults
from tests.chaos.plant import Plant
from tests.chaos.scenario import CALM_AT_S, Client, make_scenario
from tests.chaos.witness import Run, Witness

START_S = 0.5
"""Workers join before the first request comes."""
LAST_DEADLINE_S = START_S + CALM_AT_S + 20.0
"""A request's time starts when its frontend, which may be paused, hears of it."""
RECOVERED_S = 8.0
"""So long after the troubles end everything is as if there had been none."""
EARLY_LOOKS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 12.0)
"""After it is calm."""
LAST_COMMANDS = 12
"""Shown of a run that failed."""
QUIET_S = 16.0
"""After the last deadline: longer than a worker keeps what a vanished frontend left behind."""


class Simulation:
    """run() raises AssertionError, or whatever a core raises, where something is wrong."""

    def __init__(self, seed: int) -> None:
        self.scenario = make_scenario(seed)
        self.witness = Witness(
            self.scenario.calm,
            self._well_by(),
            frozenset({"t"} if self.scenario.shape.terms else ()),
        )
        self.checks = Checks(self.scenario)
        self.plant = Plant(self.scenario, self._observe, self._after)
        self.world = self.plant.world
        self._faults = Faults(self.plant, START_S + CALM_AT_S, self._frontend_ended)
        self._served_by: dict[RequestId, Process] = {}
        self._last: deque[tuple[float, str, Command]] = deque(maxlen=LAST_COMMANDS)

    def run(self) -> Simulation:
        self.plant.start()
        for number, client in enumerate(self.scenario.clients):
            at = START_S + client.planned.at
            self.world.call(at, partial(self._begin, RequestId(f"r{number}"), client))
        for fault in self.scenario.faults:
            self.world.call(START_S + fault.at, partial(self._faults.befall, fault))
        self.world.call(START_S + CALM_AT_S, self.plant.calm)
        if self.scenario.thorough or not self._soon_quiet():
            self.world.run(LAST_DEADLINE_S + 1.0)
            assert not self.witness.open_runs(), f"never ended: {self.witness.open_runs()}"
            self.world.run(LAST_DEADLINE_S + QUIET_S)
            self.checks.quiet(self.plant)
        return self

    def _soon_quiet(self) -> bool:
        """Whether all is as it should be once it is calm, long before every timer has run out."""
        for at in EARLY_LOOKS_S:
            self.world.run(START_S + CALM_AT_S + at)
            if self.witness.open_runs():
                continue
            with suppress(AssertionError):
                self.checks.quiet(self.plant)
                return True
        return False

    def _well_by(self) -> float:
        """From when on no request may run out of time. A client that reads nothing for long keeps
        its reservation for as long, and others out."""
        slow = any(c.pauses is not None and c.pauses[1] > 1 for c in self.scenario.clients)
        busy = self.scenario.serial_s() > RECOVERED_S / 2
        return inf if slow or busy else START_S + CALM_AT_S + RECOVERED_S

    # ---------------------------------------------------------------- clients

    def _begin(self, request_id: RequestId, client: Client) -> None:
        frontend = self.world.frontends[f"f{client.frontend % self.scenario.shape.frontends}"]
        if not frontend.alive:
            return  # nobody answers the client's connection
        begin = client.planned.begin(request_id, self.scenario.shape.block_size)
        run = self.witness.begin(begin, client.expected, self.world.now)
        self._served_by[request_id] = frontend
        self.world.tell(frontend, begin)
        now = self.world.now
        if client.leaves is not None:
            self._later(now + client.leaves, run, ClientGone(request_id))
        if client.pauses is not None:
            at, seconds = client.pauses
            self._later(now + at, run, ClientPaused(request_id))
            self._later(now + at + seconds, run, ClientReady(request_id))

    def _later(self, at: float, run: Run, event: Event) -> None:
        """The client does something, if its request is still open by then."""

        def tell() -> None:
            if not (run.outcome.over or run.outcome.left or run.abandoned):
                run.outcome.left = isinstance(event, ClientGone)
                run.paused |= isinstance(event, ClientPaused)
                self.world.tell(self._served_by[run.outcome.request_id], event)

        self.world.call(at, tell)

    def _frontend_ended(self, frontend: Process) -> None:
        for run in self.witness.open_runs():
            if self._served_by[run.outcome.request_id] is frontend:
                run.abandoned = True

    # ---------------------------------------------------------------- watching

    def last_commands(self) -> list[str]:
        """What the cores asked for at last, for people."""
        return [f"{at:.6f} {name}: {command!s:.200}" for at, name, command in self._last]

    def _observe(self, process: Process, command: Command) -> None:
        self._last.append((self.world.now, process.name, command))
        self.plant.keep(process, command)
        self.witness.observe(command, self.world.now)

    def _after(self, process: Process, event: Event) -> None:
        if isinstance(event, ClientGone):
            self.witness.runs[event.request_id].forgotten = True
        self.checks.after(process.core, event)

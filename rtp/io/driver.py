"""The asyncio driver of a core: events on arrival, one Tick a loop turn behind them, deadlines."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rtp.core.commands import Command
from rtp.core.events import Event, Tick
from rtp.io.clock import LoopTimes, now

TICK = Tick()
EARLIEST_S = 0.001
"""Shortest timer; loops count whole milliseconds, so a shorter one could fire before its time for
ever."""


class Core(Protocol):
    """What Master, Worker and Frontend have in common."""

    def handle(self, event: Event, now: float) -> list[Command]: ...

    def next_deadline(self) -> float | None: ...


class Driver:
    """Drives one core inside the running loop.

    after_turn: called behind each Tick.
    perform: carries out one command; called after the core's state has moved, in the order of the
    commands. What it tells a driver meanwhile (a message to a core in the same process) is handled
    when the commands at hand are through, so handle() is never entered twice.
    """

    def __init__(
        self,
        core: Core,
        perform: Callable[[Command], None],
        after_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self.times = LoopTimes()
        self._after_turn = after_turn
        self._core = core
        self._perform = perform
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Event] = deque()
        self._busy = False
        self._tick: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._turn_cpu_s = 0.0
        self._closed = False

    def tell(self, event: Event) -> None:
        """Hands the core an event now; the Tick of this turn follows when all input is in."""
        if self._closed:
            return
        self._inbox.append(event)
        if not self._busy:
            self._run()
        if self._tick is None:
            # Input callbacks of this turn are already queued ahead of this one.
            self._tick = self._loop.call_soon(self._end_turn)

    def close(self) -> None:
        """No event reaches the core any more."""
        self._closed = True
        for handle in (self._tick, self._timer):
            if handle is not None:
                handle.cancel()

    def _run(self) -> None:
        start = time.thread_time()
        self._busy = True
        try:
            while self._inbox:
                for command in self._core.handle(self._inbox.popleft(), now()):
                    self._perform(command)
        finally:
            self._busy = False
            self._turn_cpu_s += time.thread_time() - start

    def _end_turn(self) -> None:
        self._tick = None
        self._inbox.append(TICK)
        self._run()
        self.times.turn(self._turn_cpu_s)
        self._turn_cpu_s = 0.0
        self._after_turn()
        if self._tick is None and not self._closed:
            self._arm()

    def _arm(self) -> None:
        deadline = self._core.next_deadline()
        if deadline is None:
            return
        wait = deadline - now()
        if wait <= 0:
            self._tick = self._loop.call_soon(self._end_turn)
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return  # it fires, finds nothing due and arms again: cheaper than a new one
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(wait, EARLIEST_S), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        if self._tick is None and not self._closed:
            self._tick = self._loop.call_soon(self._end_turn)

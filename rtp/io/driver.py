"""The asyncio driver of a core: events on arrival, one Tick a loop turn behind them, deadlines."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rtp.core.commands import Command, Note
from rtp.core.events import Event, Tick
from rtp.io.clock import LoopTimes, now

TICK = Tick()
FAULT_PAUSE_S = 0.05
EARLIEST_S = 0.001
"""Shortest timer; loops count whole milliseconds, so a shorter one could fire before its time for
ever."""


def fault_note(core: str, error: Exception) -> Note:
    """What an operator needs to report a bug."""
    lines = traceback.format_exception(error)
    return Note("core.failed", {"core": core, "error": repr(error), "traceback": "".join(lines)})


class Core(Protocol):
    """What Master, Worker and Frontend have in common."""

    def handle(self, event: Event, now: float) -> list[Command]: ...

    def next_deadline(self) -> float | None: ...


class Driver:
    """Drives one core inside the running loop.

    perform: carries out one command; called after the core's state has moved, in the order of the
    commands. What it tells a driver meanwhile (a message to a core in the same process) is handled
    when the commands at hand are through, so handle() is never entered twice.
    on_fault: gets what a core or perform raised, which is a bug; the loop goes on with the next
    event. after_turn: called behind each Tick.
    """

    def __init__(
        self,
        core: Core,
        perform: Callable[[Command], None],
        on_fault: Callable[[Exception], None],
        after_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self.times = LoopTimes()
        self._on_fault = on_fault
        self._after_turn = after_turn
        self._core = core
        self._perform = perform
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Event] = deque()
        self._busy = False
        self._faulty = False
        self._tick: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._began = 0.0
        self._closed = False

    def tell(self, event: Event) -> None:
        """Hands the core an event now; the Tick of this turn follows when all input is in."""
        if self._closed:
            return
        if self._tick is None:
            # Input callbacks of this turn are already queued ahead of this one.
            self._begin_turn()
        if self._busy:
            self._inbox.append(event)
        else:
            self._run(event)

    def close(self) -> None:
        """No event reaches the core any more."""
        self._closed = True
        for handle in (self._tick, self._timer):
            if handle is not None:
                handle.cancel()

    def _begin_turn(self) -> None:
        self._began = time.thread_time()
        self._tick = self._loop.call_soon(self._end_turn)

    def _run(self, event: Event) -> None:
        """The event, and what commands that follow from it tell this core."""
        self._busy, inbox = True, self._inbox
        try:
            while True:
                try:
                    for command in self._core.handle(event, now()):
                        self._perform(command)
                except Exception as error:
                    self._faulty = True
                    self._on_fault(error)
                if not inbox:
                    return
                event = inbox.popleft()
        finally:
            self._busy = False

    def _end_turn(self) -> None:
        self._tick, began = None, self._began
        self._run(TICK)
        self.times.turn(time.thread_time() - began)  # a system call: not one per event
        self._after_turn()
        if self._faulty:
            # A Tick that fails may leave its deadline where it was: no busy loop of failures.
            self._faulty = False
            self._arm_at(now() + FAULT_PAUSE_S)
        elif self._tick is None and not self._closed:
            self._arm()

    def _arm(self) -> None:
        deadline = self._core.next_deadline()
        if deadline is None:
            return
        if deadline <= now():
            self._begin_turn()
        else:
            self._arm_at(deadline)

    def _arm_at(self, deadline: float) -> None:
        if self._timer is not None:
            if self._timer_at <= deadline:
                return  # it fires, finds nothing due and arms again: cheaper than a new one
            self._timer.cancel()
        self._timer_at = deadline
        wait = max(deadline - now(), EARLIEST_S)
        self._timer = self._loop.call_later(wait, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        if self._tick is None and not self._closed:
            self._begin_turn()

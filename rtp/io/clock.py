"""The monotonic clock of the drivers, and how well a loop keeps to it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

now = time.monotonic
"""Seconds, float. The only clock that reaches a core."""

SAMPLE_S = 0.05
BUSY_SAMPLES = 10
COLLECT_S, COLLECT_BY_S = 0.25, 10.0
"""Young collections: in a quiet moment, and without one. Each looks at what lives, 5 ms for what
thousands of requests keep, so that a loop that is busy does without while its objects go as they
come."""
MOST_GROWN = 20_000
"""Objects more than after the last collection for which a busy loop collects all the same."""
FULL_S, FULL_BY_S = 30.0, 600.0
QUIET_TURNS, IDLE_TURNS = 20, 2
"""Turns of a sample period up to which a moment counts as quiet, as idle."""
QUIET_S = 0.02
"""CPU of those turns up to which it does: the turns of a loop with too much to do are few and long.
"""


@dataclass(slots=True)
class LoopTimes:
    """What a loop costs and how late it runs; counters only grow, so a scraper can take rates."""

    turns: int = 0
    cpu_s: float = 0.0
    """The thread's CPU from the first input of each turn to the end of its decisions: preemption is
    not in it (see wall excursions with little own CPU)."""
    max_turn_cpu_s: float = 0.0
    busy: float = 0.0
    """The thread's share of a core in the last BUSY_SAMPLES samples."""
    samples: int = 0
    late_s: float = 0.0
    """Sum over samples of how late a timer fired."""
    max_late_s: float = 0.0
    collections: int = 0
    collect_s: float = 0.0
    max_collect_s: float = 0.0

    def turn(self, cpu_s: float) -> None:
        self.turns += 1
        self.cpu_s += cpu_s
        self.max_turn_cpu_s = max(self.max_turn_cpu_s, cpu_s)

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


class LoopWatch:
    """Measures lateness of the running loop and, after settle(), collects garbage when it is idle.

    A full collection over a large prefix map stops the loop for tens of milliseconds. What exists
    once serving starts is therefore frozen and the automatic collector is off. Young objects are
    collected in a quiet moment, or after COLLECT_BY_S or MOST_GROWN of them without one; all
    unfrozen ones, so that cycles that lived a little longer do not pile up, when nothing happens at
    all, or after FULL_BY_S.
    """

    def __init__(
        self, times: LoopTimes, on_busy: Callable[[float], None] = lambda share: None
    ) -> None:
        """on_busy: told the thread's share of a core every BUSY_SAMPLES samples."""
        self._times = times
        self._on_busy = on_busy
        self._measured = (now(), time.thread_time())
        self._loop = asyncio.get_running_loop()
        self._turns_seen = 0
        self._cpu_seen_s = 0.0
        self._settled = False
        self._collected_at = self._cleaned_at = now()
        self._due = now() + SAMPLE_S
        self._timer = self._loop.call_later(SAMPLE_S, self._sample)

    def settle(self) -> None:
        """Call once, when everything long-lived has been built."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._settled = True

    def close(self) -> None:
        self._timer.cancel()
        if self._settled:
            gc.enable()
            gc.unfreeze()
            self._settled = False

    def _sample(self) -> None:
        late = max(0.0, now() - self._due)
        self._times.samples += 1
        self._times.late_s += late
        self._times.max_late_s = max(self._times.max_late_s, late)
        if self._times.samples % BUSY_SAMPLES == 0:
            self._measure_busy()
        if self._settled:
            self._maybe_collect()
        self._due = now() + SAMPLE_S
        self._timer = self._loop.call_later(SAMPLE_S, self._sample)

    def _measure_busy(self) -> None:
        (before, cpu_before), (at, cpu) = self._measured, (now(), time.thread_time())
        self._measured = (at, cpu)
        self._times.busy = (cpu - cpu_before) / max(at - before, SAMPLE_S)
        self._on_busy(self._times.busy)

    def _maybe_collect(self) -> None:
        start = now()
        turns = self._times.turns - self._turns_seen  # since the last sample
        quiet = turns <= QUIET_TURNS and self._times.cpu_s - self._cpu_seen_s <= QUIET_S
        self._turns_seen, self._cpu_seen_s = self._times.turns, self._times.cpu_s
        young, full = start - self._collected_at, start - self._cleaned_at
        if full > (FULL_S if turns <= IDLE_TURNS else FULL_BY_S):
            gc.collect()
            self._cleaned_at = start
        elif young > (COLLECT_S if quiet else COLLECT_BY_S) or gc.get_count()[0] > MOST_GROWN:
            gc.collect(1)
        else:
            return
        self._collected_at = now()
        spent = self._collected_at - start
        self._times.collections += 1
        self._times.collect_s += spent
        self._times.max_collect_s = max(self._times.max_collect_s, spent)

"""The monotonic clock of the drivers, and how well a loop keeps to it."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass

now = time.monotonic
"""Seconds, float. The only clock that reaches a core."""

SAMPLE_S = 0.05
COLLECT_S = 0.25


@dataclass(slots=True)
class LoopTimes:
    """What a loop costs and how late it runs; counters only grow, so a scraper can take rates."""

    turns: int = 0
    cpu_s: float = 0.0
    """Own CPU of all turns: preemption is not in it (see wall excursions with little own CPU)."""
    max_turn_cpu_s: float = 0.0
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
    once serving starts is therefore frozen, the automatic collector is off, and young objects are
    collected on purpose in a quiet turn (at the latest every tenth sample period that wanted it).
    """

    def __init__(self, times: LoopTimes) -> None:
        self._times = times
        self._loop = asyncio.get_running_loop()
        self._turns_seen = 0
        self._put_off = 0
        self._settled = False
        self._due = now() + SAMPLE_S
        self._next_collect = now() + COLLECT_S
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
        if self._settled and now() >= self._next_collect:
            self._collect()
        self._due = now() + SAMPLE_S
        self._timer = self._loop.call_later(SAMPLE_S, self._sample)

    def _collect(self) -> None:
        quiet = self._times.turns - self._turns_seen < 20
        self._turns_seen = self._times.turns
        self._put_off += 1
        if not quiet and self._put_off < 10:
            return
        self._put_off = 0
        start = now()
        # Generation 1 by habit; everything unfrozen only when nothing happens at all.
        gc.collect(1)
        spent = now() - start
        self._times.collections += 1
        self._times.collect_s += spent
        self._times.max_collect_s = max(self._times.max_collect_s, spent)
        self._next_collect = now() + COLLECT_S

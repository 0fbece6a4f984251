"""When the rows of a trace arrive: as written, spread inside its grid, in open or in closed loop.

In open loop a row comes at its own time, whatever became of those before it. In closed loop a row
with `after` comes `think_s` after that row's end: an agent, or a person who reads the answer first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from math import inf
from random import Random

from rtp.core.errors import ConfigError
from rtp.core.trace import TraceRow


class Arrivals:
    """Which rows come next; the driver tells what has ended."""

    def __init__(self, rows: Sequence[TraceRow]) -> None:
        """Raises ConfigError where a row waits for one that does not come before it."""
        self._rows = rows
        self._open: list[int] = []
        self._behind: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if row.after < 0:
                self._open.append(index)
            elif row.after < index:
                self._behind.setdefault(row.after, []).append(index)
            else:
                raise ConfigError(f"row {index} of the trace waits for row {row.after}, not before")
        self._open.sort(key=lambda index: rows[index].arrival_s)
        self._next = 0

    def next_s(self) -> float | None:
        """Arrival of the next rows that wait for nothing; None: they all have come."""
        if self._next == len(self._open):
            return None
        return self._rows[self._open[self._next]].arrival_s

    def take(self) -> list[int]:
        """The rows of that instant, in the trace's order."""
        at, first = self.next_s(), self._next
        while self.next_s() == at and self._next < len(self._open):
            self._next += 1
        return self._open[first : self._next]

    def behind(self, index: int) -> list[int]:
        """The rows that wait for this one, which has ended; each to come `think_s` from now."""
        return self._behind.get(index, [])


def open_loop(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """The same rows, none waiting for another: each at its `arrival_s`."""
    return [replace(row, after=-1, think_s=0.0) for row in rows]


def part(rows: Sequence[TraceRow], first: int, end: int) -> list[TraceRow]:
    """rows[first:end] as a trace of its own: it starts at 0, and what would wait for a row outside
    comes at its own time."""
    if not rows[first:end]:
        return []
    start_s = rows[first].arrival_s
    return [
        replace(
            row,
            arrival_s=row.arrival_s - start_s,
            after=row.after - first if row.after >= first else -1,
            think_s=row.think_s if row.after >= first else 0.0,
        )
        for row in rows[first:end]
    ]


def grid_s(rows: Sequence[TraceRow]) -> float:
    """The least time between two instants at which rows arrive; 0 where no two rows share one, and
    so there is no grid."""
    times = sorted({row.arrival_s for row in rows})
    if len(times) == len(rows):
        return 0.0
    return min((b - a for a, b in pairwise(times)), default=0.0)


def spread(rows: Sequence[TraceRow], seed: int, within_s: float | None = None) -> list[TraceRow]:
    """Rows of one instant drawn evenly over the `within_s` that follow it, or up to the next
    instant where that is nearer: they stay in the trace's order.

    within_s: the trace's own grid where None. Rows are by arrival. Rows that wait for another keep
    their think time. The same seed gives the same times.
    """
    within_s = grid_s(rows) if within_s is None else within_s
    random = Random(seed)
    instants = [(at, list(group)) for at, group in groupby(rows, key=lambda row: row.arrival_s)]
    ends = [at for at, _ in instants[1:]] + [inf]
    out: list[TraceRow] = []
    for (at, members), end in zip(instants, ends, strict=True):
        room = min(within_s, end - at)
        offsets = sorted(room * random.random() for _ in members)
        out += [
            replace(row, arrival_s=at + offset)
            for row, offset in zip(members, offsets, strict=True)
        ]
    first_s = out[0].arrival_s if out else 0.0
    return [replace(row, arrival_s=row.arrival_s - first_s) for row in out]

"""Steps that take far longer than they should: noticed while they hang, not when they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rtp.core.commands import Note
from rtp.core.steps import StepPlan
from rtp.io.clock import now

FACTOR = 5.0
FLOOR_S = 2.0
"""A step is never called hung earlier: small predictions are mostly noise."""
FATAL_S = 60.0
FATAL_FACTOR = 20.0
"""A step that takes so long will not end: the worker gives up, to be started again."""
LOOK_S = 0.25


def predicted_s(plan: StepPlan, profile: Sequence[float]) -> float:
    """Seconds of a step by the coefficients measured at start (io/measure); 0 without them."""
    if not profile:
        return 0.0
    a, b, c, d, e, f = profile
    seconds, decodes, context = 0.0, 0, 0
    for row in plan.rows:
        if row.num_new == 1:
            decodes += 1
            context += row.start
        else:
            seconds += b * row.num_new + c * row.num_new * (row.start + row.num_new / 2)
    if seconds:
        seconds += a
    if decodes:
        seconds += d + e * decodes + f * context
    return seconds


class StallWatch:
    """Limits for the steps in flight. A step over FACTOR x its prediction, and over FLOOR_S, is
    hung: noted once, and stalled() says so until it ends. on_change(hung): the first of them hangs,
    or the last that did has ended. on_fatal(reason): over FATAL_S and FATAL_FACTOR."""

    def __init__(
        self,
        profile: Sequence[float],
        on_note: Callable[[Note], None],
        on_change: Callable[[bool], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        self._on_change = on_change
        self._on_fatal = on_fatal
        self._profile = profile
        self._on_note = on_note
        self._flying: dict[tuple[int, int], tuple[float, float]] = {}  # began, limit
        self._hung: set[tuple[int, int]] = set()
        self._free_at: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        self._timer.cancel()

    def begun(self, rank: int, plan: StepPlan) -> None:
        """Steps of a rank run one after the other: one in flight waits for those before it."""
        predicted = predicted_s(plan, self._profile)
        start = max(now(), self._free_at.get(rank, 0.0))
        self._free_at[rank] = start + predicted
        limit = start - now() + max(FLOOR_S, FACTOR * predicted)
        self._flying[rank, plan.step] = (now(), limit)

    def done(self, rank: int, step: int) -> None:
        self._flying.pop((rank, step), None)
        if (rank, step) in self._hung:
            self._hung.remove((rank, step))
            if not self._hung:
                self._on_change(False)
        if not any(key[0] == rank for key in self._flying):
            self._free_at.pop(rank, None)

    def stalled(self) -> str:
        """Which step hangs, or ''."""
        return f"step {min(self._hung)[1]} hangs" if self._hung else ""

    def _look(self) -> None:
        for (rank, step), (began, limit) in self._flying.items():
            waited = now() - began
            if waited > limit and (rank, step) not in self._hung:
                self._hung.add((rank, step))
                fields: dict[str, object] = {"rank": rank, "step": step, "waited_s": waited}
                self._on_note(Note("step.hung", fields | {"limit_s": limit}))
                if len(self._hung) == 1:
                    self._on_change(True)
            if waited > max(FATAL_S, limit * FATAL_FACTOR / FACTOR):
                self._on_fatal(f"rank {rank}: step {step} hangs since {waited:.0f} s")
        self._timer = self._loop.call_later(LOOK_S, self._look)

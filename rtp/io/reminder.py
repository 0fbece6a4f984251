"""How often a lasting trouble is logged: at once, then once a minute while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from rtp.io.clock import now

AGAIN_S = 60.0
KEPT = 64


class Reminder:
    """Remembers the last `KEPT` troubles."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._told: dict[str, float] = {}

    def due(self, trouble: str) -> bool:
        """Whether to tell of it now."""
        at = self._clock()
        if at - self._told.get(trouble, -inf) < AGAIN_S:
            return False
        self._told.pop(trouble, None)
        self._told[trouble] = at
        if len(self._told) > KEPT:
            del self._told[next(iter(self._told))]
        return True

    def over(self) -> None:
        """There is no trouble any more; the next one is new."""
        self._told.clear()

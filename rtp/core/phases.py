"""The life of a request as a table: each phase names the phases that may follow it."""

from __future__ import annotations

from enum import Enum, auto

from rtp.core.errors import IllegalMove


class Phase(Enum):
    """Where a request is. The last four are terminal and never change."""

    QUEUED = auto()  # asked of the Master, not yet granted
    PREFILL = auto()  # submitted to a worker, no token yet
    DECODE = auto()  # at least one token arrived
    DONE = auto()  # every choice finished
    FAILED = auto()  # ended by an error
    CANCELLED = auto()  # the client left
    REJECTED = auto()  # refused before any work was done


TERMINAL = frozenset({Phase.DONE, Phase.FAILED, Phase.CANCELLED, Phase.REJECTED})

MOVES: dict[Phase, frozenset[Phase]] = {
    # DECODE -> QUEUED is a resume after a lost worker; PREFILL -> QUEUED a re-placement.
    Phase.QUEUED: frozenset({Phase.PREFILL, Phase.REJECTED, Phase.FAILED, Phase.CANCELLED}),
    Phase.PREFILL: frozenset(
        {Phase.DECODE, Phase.DONE, Phase.QUEUED, Phase.FAILED, Phase.CANCELLED}
    ),
    Phase.DECODE: frozenset({Phase.DONE, Phase.QUEUED, Phase.FAILED, Phase.CANCELLED}),
    Phase.DONE: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
    Phase.REJECTED: frozenset(),
}


def move(phase: Phase, to: Phase) -> Phase:
    """Returns `to`. Raises IllegalMove where the table does not allow it."""
    if to not in MOVES[phase]:
        raise IllegalMove(f"{phase.name} -> {to.name}")
    return to

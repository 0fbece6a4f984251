"""The rank table: one row of numbers per rank, and how the rows of one model are read.

What a rank reported stands first, in the order of its Status, what the Master counts itself behind.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rtp.core.messages import STATUS_COLUMNS
from rtp.core.types import IntArray

Item = TypeVar("Item", bound=np.generic)

REPORTED = (
    *("running", "waiting", "prefill_tokens", "decode_rows", "context_tokens", "kv_free"),
    *("kv_total", "host_free", "host_total", "step_us", "step_age_us"),
)
NUM_REPORTED = len(REPORTED)
RUNNING, WAITING, PREFILL, DECODE_ROWS, CONTEXT, KV_FREE = range(6)
KV_TOTAL, HOST_FREE, HOST_TOTAL, STEP_US, STEP_AGE_US = range(6, NUM_REPORTED)
assert (*REPORTED, "granted_upto", "granted_mask") == STATUS_COLUMNS
UPTO, MASK = NUM_REPORTED, NUM_REPORTED + 1
"""Columns of Status.table behind the load."""
COLUMN = {name: i for i, name in enumerate(STATUS_COLUMNS)}

OWN = (
    *("charged_tokens", "charged_requests", "reserved_tokens", "parked_requests", "held"),
    *("held_s", "busy_until", "budget", "most_requests", "next_number", "seen_upto"),
    *("refused", "reported_at", "num_unseen", "prompt_tokens", "prompt_s"),
)
CHARGED_TOKENS, CHARGED_REQUESTS, RESERVED, PARKED, HELD = range(NUM_REPORTED, NUM_REPORTED + 5)
HELD_S, BUSY_UNTIL, BUDGET, MOST_REQUESTS, NEXT_NUMBER, SEEN_UPTO = range(
    NUM_REPORTED + 5, NUM_REPORTED + 11
)
REFUSED, REPORTED_AT, NUM_UNSEEN, PROMPT_TOKENS, PROMPT_S = range(
    NUM_REPORTED + 11, NUM_REPORTED + len(OWN)
)
NUM_COLUMNS = NUM_REPORTED + len(OWN)

MIXED = -1
NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


class Rows:
    """Rows of the rank table, ascending: consecutive ones are read where they lie, others are
    copied."""

    __slots__ = ("_span", "array", "hardware")

    def __init__(self, rows: IntArray, classes: IntArray) -> None:
        """classes: [R] hardware class of each row."""
        self.array = np.ascontiguousarray(rows)
        self.hardware = int(classes[0]) if len(rows) and (classes == classes[0]).all() else MIXED
        """Their class, if it is the same for all."""
        first = int(rows[0]) if len(rows) else 0
        together = len(rows) > 0 and int(rows[-1]) - first == len(rows) - 1
        self._span = slice(first, first + len(rows)) if together else None

    def __len__(self) -> int:
        return len(self.array)

    def of(self, column: npt.NDArray[Item]) -> npt.NDArray[Item]:
        """[R] of a column [capacity]; not to be written to."""
        return column[self._span] if self._span is not None else column.take(self.array)

    def index(self, row: int) -> int:
        """Where a row stands among these."""
        if self._span is not None:
            return row - int(self._span.start)
        return int(self.array.searchsorted(row))

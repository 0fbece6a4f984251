"""Columns with one entry per row of the rank table, and how the rows of one model read them."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rtp.core.messages import STATUS_COLUMNS
from rtp.core.types import IntArray

Item = TypeVar("Item", bound=np.generic)

NUM_REPORTED = STATUS_COLUMNS.index("granted_upto")
"""Columns of Status.table that are load; the two behind them are about grant numbers."""
COLUMN = {name: i for i, name in enumerate(STATUS_COLUMNS)}
MIXED = -1
NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


class Rows:
    """Rows of a table, ascending: consecutive ones are read where they lie, others are copied."""

    __slots__ = ("_span", "array", "hardware")

    def __init__(self, rows: IntArray, classes: IntArray) -> None:
        """classes: [R] hardware class of each row."""
        self.array = rows
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

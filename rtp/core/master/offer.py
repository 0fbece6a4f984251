"""The candidates of one request as its policy sees them: a column is made when it is first read."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtp.core.master.load import VIEW
from rtp.core.master.prefix_map import Match
from rtp.core.master.view import View
from rtp.core.policy import TABLE, Candidates
from rtp.core.types import FloatArray, IntArray

Column = np.ndarray[Any, Any]
VIEWED = {
    name: VIEW.index(name)
    for name in Candidates.__dataclass_fields__
    if name in VIEW  # the others are of one request, not of the round
}
EVERYBODY: IntArray = np.zeros(0, dtype=np.int64)
"""Where all ranks of a view stand."""
_put = object.__setattr__  # a policy cannot


class Offer(Candidates):
    """Columns of a View for the ranks that a policy is shown. It reads some three of twelve: the
    others cost nothing."""

    __slots__ = ("_affine_row", "_at", "_columns", "_match", "_most", "_view")

    _view: View
    _at: IntArray
    """Where they stand in the view; empty: they are all of it."""
    _columns: FloatArray
    """[VIEW, n], read-only."""
    _match: Match
    _most: int
    _affine_row: int

    def __init__(
        self, view: View, at: IntArray, match: Match, *, most: int, affine_row: int
    ) -> None:
        """at: where the ranks that the policy is shown stand in view.rows; EVERYBODY: all of them.
        match: of the prompt, of which view.matched_tokens tells what is on device; at most `most`
        count."""
        columns = _frozen(view.columns.take(at, axis=1)) if len(at) else view.read_only
        _put(self, "_columns", columns)
        _put(self, "_view", view)
        _put(self, "_at", at)
        _put(self, "_match", match)
        _put(self, "_most", most)
        _put(self, "_affine_row", affine_row)

    def __getattr__(self, name: str) -> Any:  # Any: best_tokens is a number
        """A column that was not read yet."""
        column: Column | float
        index = VIEWED.get(name)
        if index is not None:
            column = self._columns[index]
        elif name == "rank_ids":
            rows = self._view.rows
            column = _frozen(rows.take(self._at) if len(self._at) else rows[:])
        elif name == "host_tokens":
            held = self._match.host.take(self.rank_ids)
            column = _frozen(np.minimum(held * self._view.block_size, self._most))
        elif name == "best_tokens":
            column = float(min(self._match.best * self._view.block_size, self._most))
        elif name == "affine":
            column = _frozen(self.rank_ids == self._affine_row)
        else:
            raise AttributeError(name)
        _put(self, name, column)
        return column

    def __len__(self) -> int:
        return int(self._columns.shape[1])

    @property
    def table(self) -> FloatArray:
        return self._columns[: len(TABLE)]

    # ------------------------------------------------------------ for the Master

    @property
    def coefficients(self) -> FloatArray:
        """[6, n] or [6, 1], as in the view."""
        whole = self._view.coefficients
        return whole.take(self._at, axis=1) if len(self._at) and whole.shape[1] > 1 else whole

    def place(self, index: int) -> int:
        """Where in the view one of these ranks stands."""
        return self._at.item(index) if len(self._at) else index


def _frozen(column: Column) -> Column:
    column.setflags(write=False)
    return column

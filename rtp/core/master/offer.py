"""The candidates of one request as its policy sees them: a column is made when it is first read."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from rtp.core.master.columns import Item
from rtp.core.master.prefix_map import Match
from rtp.core.master.view import View
from rtp.core.policy import Candidates
from rtp.core.types import BoolArray, FloatArray, IntArray

Column = np.ndarray[Any, Any]
VIEWED = frozenset(Candidates.__dataclass_fields__) - {
    *("rank_ids", "matched_tokens", "host_tokens", "best_tokens", "affine")
}
"""Columns that the view has under the same name."""
_put = object.__setattr__  # a policy cannot


class Offer(Candidates):
    """Columns of a View for the ranks that may take this request. A policy reads some three of
    twelve: the others cost nothing."""

    __slots__ = (
        *("_affine_row", "_at", "_block_size", "_mask", "_match", "_most", "_view"),
        "num_candidates",
    )

    num_candidates: int
    _view: View
    _at: IntArray | None
    """Where the rows stand in the view; None: they are all of it."""
    _mask: BoolArray | None
    """Which of them are candidates; None: all."""
    _match: Match
    _most: int
    _block_size: int
    _affine_row: int

    def __init__(
        self,
        view: View,
        at: IntArray | None,
        mask: BoolArray | None,
        match: Match,
        matched: FloatArray,
        *,
        most: int,
        block_size: int,
        affine_row: int,
        num_candidates: int,
    ) -> None:
        """at: where the ranks that the policy is shown stand in view.rows; None: all of them. mask:
        which of those are candidates; None: all. matched: [R] tokens of `match` on device, at most
        `most`. num_candidates: how many there are, those that cannot win included."""
        _put(self, "num_candidates", num_candidates)
        _put(self, "_mask", mask)
        _put(self, "_view", view)
        _put(self, "_at", at)
        _put(self, "_match", match)
        _put(self, "_most", most)
        _put(self, "_block_size", block_size)
        _put(self, "_affine_row", affine_row)
        _put(self, "matched_tokens", self._of(matched))
        if at is None:
            for name, column in view.read_only:
                _put(self, name, column)

    def __getattr__(self, name: str) -> Any:  # Any: best_tokens is a number
        """A column that was not read yet."""
        column: Column | float
        if name in VIEWED:
            column = self._of(getattr(self._view, name))
        elif name == "rank_ids":
            column = self._of(self._view.rows)
        elif name == "host_tokens":
            held = self._of(self._view.at.of(self._match.host))
            column = _frozen(np.minimum(held * self._block_size, self._most))
        elif name == "best_tokens":
            column = float(min(self._match.best * self._block_size, self._most))
        elif name == "affine":
            column = _frozen(self.rank_ids == self._affine_row)
        else:
            raise AttributeError(name)
        _put(self, name, column)
        return column

    def __len__(self) -> int:
        return len(self.matched_tokens)

    # ------------------------------------------------------------ for the Master

    @property
    def coefficients(self) -> FloatArray:
        """[6, R] or [6, 1], as in the view."""
        whole = self._view.coefficients
        return whole if self._at is None or whole.shape[1] == 1 else whole.take(self._at, axis=1)

    def masked(self, scores: FloatArray) -> FloatArray:
        """A policy's scores, ours to change: minus infinity for ranks that are no candidates."""
        return scores.copy() if self._mask is None else np.where(self._mask, scores, -inf)

    def which(self, column: BoolArray) -> BoolArray:
        """Which candidates a column of the view is true for."""
        found = self._of(column)
        return found if self._mask is None else found & self._mask

    def least(self, ties: IntArray) -> int:
        """Of candidates with equal scores, ascending: a ready one, the chat's own, the least
        loaded, the lowest id."""
        view, at = self._view, self._at
        where = ties if at is None else at.take(ties)
        ready = view.ready.take(where)
        if 0 < np.count_nonzero(ready) < len(ties):
            ties, where = ties[ready], where[ready]
        if self._affine_row >= 0:
            own = (view.rows.take(where) == self._affine_row).nonzero()[0]
            if len(own):
                return int(ties[own[0]])
        return ties.item(view.load.take(where).argmin())

    def ready(self, index: int) -> bool:
        """Whether this candidate takes it now."""
        return bool(self._view.ready.item(index if self._at is None else self._at.item(index)))

    def _of(self, column: npt.NDArray[Item]) -> npt.NDArray[Item]:
        return _frozen(column[:] if self._at is None else column.take(self._at))


def _frozen(column: npt.NDArray[Item]) -> npt.NDArray[Item]:
    column.setflags(write=False)
    return column

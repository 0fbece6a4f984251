"""What the ranks of one model look like during a round: columns for the policy and the order.

A round reads anew what changed since the last one, and what time changes of all; a row that the
round itself charges is read anew at once, so that the sixteenth decision of a round sees what the
first fifteen did.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from rtp.core.master.columns import MIXED, NEXT_NUMBER, SEEN_UPTO, Rows
from rtp.core.master.contenders import matched_tokens, most_room
from rtp.core.master.load import (
    FLAGS,
    MASK_BITS,
    VIEW,
    look_at,
    next_end_s,
    see_time,
    survey,
    wanted,
)
from rtp.core.types import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from rtp.core.master.ranks import Ranks

NOBODY = -1


class View:
    """Columns of some ranks at one instant, own charges included. Length R, rows ascending; to be
    read only, and during the round only, for the next one is written over it."""

    rows: IntArray
    matched_tokens: FloatArray  # of the request that is looked at, on the device tier
    busy_s: FloatArray  # predicted prefill work not finished
    wait_s: FloatArray  # until a new prefill could start: busy_s and the requests held for the rank
    prefill_tokens: FloatArray
    num_requests: FloatArray
    decode_rows: FloatArray
    context_tokens: FloatArray
    kv_free: FloatArray
    kv_total: FloatArray
    room: FloatArray  # tokens a further request may need; infinite on a rank without requests
    load: FloatArray  # tokens in play, for ties
    reported_at: FloatArray  # when its last Status came
    ends_at: FloatArray  # when its prefill work does
    num_held: FloatArray  # requests that wait for it
    held_s: FloatArray  # their prefill work
    open: BoolArray  # has not just refused a grant, and has a row for a further request
    numbered: BoolArray  # a further grant's number fits the mask of Status
    empty: BoolArray  # nothing runs, waits or lies in pages there
    takes_held: BoolArray  # open, and few enough requests are held for it
    ready: BoolArray  # open, numbered, and work under the lead
    idle: BoolArray  # ready, empty, and nothing is held there: no rank is better off
    offered: BoolArray  # ready or takes_held
    matched: FloatArray  # tokens of the prompt looked at that each rank holds on device
    coefficients: FloatArray  # [6, R]; [6, 1] where all are equal

    __slots__ = (
        *VIEW,
        *FLAGS,
        *(
            "at",
            "block_size",
            "coefficients",
            "columns",
            "few",
            "flags",
            "mask",
            "read_only",
            "rows",
        ),
        *("_coming", "_lead_s", "_now", "_ranks"),
    )

    def __init__(self, ranks: Ranks, at: Rows) -> None:
        self._ranks, self.at, self.rows = ranks, at, at.array
        self._now, self._lead_s = 0.0, 0.0
        self.block_size = 1
        self._coming: dict[int, int] = {}
        size = len(at)
        self.columns: FloatArray = np.zeros((len(VIEW), size))
        self.flags: BoolArray = np.zeros((len(FLAGS), size), dtype=np.bool_)
        self.mask: BoolArray = np.zeros(size, dtype=np.bool_)
        self.few: IntArray = np.zeros(size, dtype=np.int64)
        """Room for what kernels find of a look: candidates, and where they stand."""
        for name, column in zip(VIEW, self.columns, strict=True):
            setattr(self, name, column)
        for name, flag in zip(FLAGS, self.flags, strict=True):
            setattr(self, name, flag)
        ranks.stale[self.rows] = True
        self.read_only = self.columns[:]
        """The same columns, as a policy may have them."""
        self.read_only.setflags(write=False)

    def begin(self, now: float, lead_s: float) -> None:
        """A round: one pass over the ranks, 3 us for 1,250."""
        self._now, self._lead_s = now, lead_s
        ranks = self._ranks
        survey(ranks.table, ranks.stale, self.rows, now, lead_s, self.columns, self.flags)
        self.coefficients = self._ranks.coefficients(self.at)

    @property
    def alike(self) -> bool:
        """All ranks take the same time for the same step."""
        return self.at.hardware != MIXED

    def where(self, row: int) -> int:
        """Where a row of the rank table stands here; -1: it does not."""
        index = self.at.index(row) if row >= 0 else NOBODY
        return index if 0 <= index < len(self.rows) and self.rows.item(index) == row else NOBODY

    def match(self, device: FloatArray, block_size: int, most: int) -> None:
        """Takes in how many blocks of a prompt each rank of the table holds: [capacity]."""
        self.block_size = block_size
        matched_tokens(device, self.rows, block_size, most, self.matched_tokens)

    @property
    def most_room(self) -> float:
        """Of all ready ranks; minus infinity where none is."""
        return most_room(self.columns, self.flags, NOBODY)

    def most_room_but(self, index: int) -> float:
        return most_room(self.columns, self.flags, index)

    @property
    def next_end_s(self) -> float:
        """Seconds until the prefill work of a busy rank, one with more of it than the lead, ends;
        infinite where none is busy."""
        return next_end_s(self.columns, self._now, self._lead_s)

    def wanted(self) -> list[int]:
        """Rows with less work than the lead for which requests are held."""
        count = wanted(self.columns, self._lead_s, self.few)
        rows: list[int] = self.rows.take(self.few[:count]).tolist() if count else []
        return rows

    def expect(self, row: int, tokens: int, choices: int) -> None:
        """A grant is decided on that will reserve so much there: further ones of the same group
        round find it taken. reread() puts the ledger's figures in its place."""
        table, i = self._ranks.table, self.at.index(row)
        room = self.room.item(i)
        self.room[i] = (self.kv_free.item(i) if room == inf else room) - tokens
        self.num_requests[i] += choices
        self.idle[i] = False
        coming = self._coming[row] = self._coming.get(row, 0) + 1
        number = table.item(row, NEXT_NUMBER) + coming
        self.numbered[i] = number - table.item(row, SEEN_UPTO) <= MASK_BITS

    def reread(self, row: int) -> None:
        """The round charged this row, or holds a request for it."""
        self._coming.pop(row, None)
        at = self.at.index(row)
        look_at(self._ranks.table, row, at, self.columns, self.flags)
        see_time(at, self._now, self._lead_s, self.columns, self.flags)

    def check(self) -> None:
        """Asserts that what did not change is as in the rank table. For tests."""
        for at, row in enumerate(self.rows.tolist()):
            if not self._ranks.stale.item(row):
                columns, flags = self.columns.copy(), self.flags.copy()
                look_at(self._ranks.table, row, at, columns, flags)
                assert (columns == self.columns).all(), row
                assert (flags == self.flags).all(), row

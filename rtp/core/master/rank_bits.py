"""Which bit of an owner set stands for which rank: a bit is one life of a rank's cache.

Retiring a life takes its bit out of `alive` at once. The bit is given to another life only after
every owner set was swept of it: begin_sweep() names the bits to sweep, end_sweep() frees them.
"""

from __future__ import annotations

import heapq

import numpy as np

from rtp.core.master.owner_sets import TwoGenerations
from rtp.core.types import FloatArray, IntArray

NO_BIT = -1
CACHED_ROWS = 4096
FEW = 16
Runs = list[tuple[int, int]]
"""(mask of ranks, blocks they hold from block 0 on), later ones being subsets of earlier ones."""


class RankBits:
    """Bits for ranks 0 .. capacity-1, each begun when first asked for. All masks are ints."""

    def __init__(self, capacity: int) -> None:
        self.alive = 0
        """Bits of present lives."""
        self.closed = 0
        """Those of them whose rank promised prefix-closed holdings."""
        self.sweeping = 0
        """Bits being swept out of the owner sets."""
        self.dead = 0
        """Retired bits that wait for the next sweep."""
        self._promised = [False] * capacity
        self._bit_of = [NO_BIT] * capacity
        self._rank_of: list[int] = []
        self._free: list[int] = []
        self._rows: TwoGenerations[int, IntArray | slice] = TwoGenerations(CACHED_ROWS)

    def of(self, rank: int) -> int:
        """The mask of the rank's present life, begun if there is none."""
        at = self._bit_of[rank]
        if at == NO_BIT:
            at = self._begin(rank)
        return 1 << at

    def living(self, rank: int) -> int:
        """The mask of the rank's present life, 0 if there is none."""
        at = self._bit_of[rank]
        return 0 if at == NO_BIT else 1 << at

    def promise(self, rank: int, closed: bool) -> None:
        self._promised[rank] = closed
        bit = self.living(rank)
        self.closed = self.closed | bit if closed else self.closed & ~bit

    def retire(self, rank: int) -> None:
        bit = self.living(rank)
        self.alive &= ~bit
        self.closed &= ~bit
        self.dead |= bit
        self._bit_of[rank] = NO_BIT

    def begin_sweep(self) -> None:
        self.sweeping, self.dead = self.dead, 0

    def end_sweep(self) -> None:
        for at in _positions(self.sweeping).tolist():
            heapq.heappush(self._free, at)
        self.sweeping = 0

    def column(self, capacity: int, runs: Runs) -> FloatArray:
        """[capacity] blocks per rank. Where few ranks are left each is set once, where it ends;
        many are set at once, and their index is kept for the next time."""
        column = np.zeros(capacity)
        ranks, last = self._rank_of, len(runs) - 1
        for number, (mask, blocks) in enumerate(runs):
            if not blocks:
                continue
            if mask.bit_count() > FEW:
                column[self._index(mask)] = blocks
                continue
            ending = mask & ~runs[number + 1][0] if number < last else mask
            while ending:
                at = ending.bit_length() - 1
                column[ranks[at]] = blocks
                ending ^= 1 << at
        return column

    def _index(self, mask: int) -> IntArray | slice:
        """Of the ranks of `mask`; a slice where they are consecutive, which is several times as
        fast."""
        rows = self._rows.get(mask)
        if rows is None:
            rows = np.array(self._rank_of, dtype=np.int64)[_positions(mask)]
            if (np.diff(rows) == 1).all():
                rows = slice(int(rows[0]), int(rows[-1]) + 1)
            self._rows.put(mask, rows)
        return rows

    def check(self) -> None:
        masks = [self.living(rank) for rank in range(len(self._bit_of))]
        assert sum(masks) == self.alive
        assert self.alive.bit_count() == sum(mask > 0 for mask in masks)
        assert not self.closed & ~self.alive
        states = (self.alive, self.dead, self.sweeping, sum(1 << at for at in self._free))
        assert sum(states) == (1 << len(self._rank_of)) - 1

    def _begin(self, rank: int) -> int:
        if self._free:
            at = heapq.heappop(self._free)
            self._rank_of[at] = rank
            self._rows = TwoGenerations(CACHED_ROWS)  # its arrays may name the bit's earlier rank
        else:
            at = len(self._rank_of)
            self._rank_of.append(rank)
        self._bit_of[rank] = at
        self.alive |= 1 << at
        if self._promised[rank]:
            self.closed |= 1 << at
        return at


def _positions(mask: int) -> IntArray:
    """Indices of the bits set, ascending."""
    data = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(data, bitorder="little").nonzero()[0]

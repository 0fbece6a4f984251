"""Which bit of an owner set stands for which rank: a bit is one life of a rank's cache.

Retiring a life takes its bit out of the mask of living ones at once. The bit is given to another
life only after every owner set was swept of it: begin_sweep() says which bits to sweep, end_sweep()
frees them. There are more bits than ranks; when none is free, sweeping some gives one.
"""

from __future__ import annotations

import heapq

import numpy as np

from rtp.core.master.owner_sets import LIVES, OwnerSets
from rtp.core.types import IntArray

NO_BIT = -1
ALIVE, CLOSED, SWEPT = range(3)
"""Masks in the row LIVES, where owner sets have their planes."""


def num_lives(capacity: int) -> int:
    """Bits for so many ranks: a quarter more, for lives that wait to be swept."""
    return capacity + capacity // 4 + 1


class RankBits:
    """Bits for ranks 0 .. capacity-1, each begun when first asked for."""

    def __init__(self, capacity: int, sets: OwnerSets) -> None:
        self._sets = sets
        num = sets.words * 64
        self.rank_of: IntArray = np.full(num, -1)
        """[bits] the rank whose life it is, or was last."""
        self.bit_of = [NO_BIT] * capacity
        """[capacity]"""
        self.dead: list[int] = []
        """Retired, to be swept next."""
        self.sweeping: list[int] = []
        self._free = list(range(num))  # a heap
        self._promised = [False] * capacity

    @property
    def free(self) -> bool:
        return bool(self._free)

    def begin(self, rank: int) -> int:
        """A new life for a rank without one. There must be a free bit."""
        bit = self.bit_of[rank] = heapq.heappop(self._free)
        self.rank_of[bit] = rank
        self._mark(ALIVE, bit, True)
        self._mark(CLOSED, bit, self._promised[rank])
        return bit

    def promise(self, rank: int, closed: bool) -> None:
        self._promised[rank] = closed
        if self.bit_of[rank] != NO_BIT:
            self._mark(CLOSED, self.bit_of[rank], closed)

    def retire(self, rank: int) -> None:
        bit = self.bit_of[rank]
        if bit != NO_BIT:
            self._mark(ALIVE, bit, False)
            self._mark(CLOSED, bit, False)
            self.dead.append(bit)
            self.bit_of[rank] = NO_BIT

    def begin_sweep(self) -> None:
        self.sweeping, self.dead = self.dead, []
        for bit in self.sweeping:
            self._mark(SWEPT, bit, True)

    def end_sweep(self) -> None:
        for bit in self.sweeping:
            self._mark(SWEPT, bit, False)
            heapq.heappush(self._free, bit)
        self.sweeping = []

    def _mark(self, mask: int, bit: int, on: bool) -> None:
        words = self._sets.plane(LIVES, mask)
        one = 1 << (bit & 63)
        word = words.item(bit >> 6)
        words[bit >> 6] = word | one if on else word & ~one

    def check(self) -> None:
        alive = sorted(bit for bit in self.bit_of if bit != NO_BIT)
        assert sorted([*alive, *self.dead, *self.sweeping, *self._free]) == list(
            range(len(self.rank_of))
        )
        masks = {ALIVE: alive, SWEPT: sorted(self.sweeping)}
        masks[CLOSED] = [bit for bit in alive if self._promised[self.rank_of[bit]]]
        for mask, bits in masks.items():
            words = self._sets.plane(LIVES, mask).view(np.uint8)
            assert np.unpackbits(words, bitorder="little").nonzero()[0].tolist() == bits
        assert all(bit == NO_BIT or self.rank_of[bit] == r for r, bit in enumerate(self.bit_of))

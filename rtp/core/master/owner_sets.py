"""Interned sets of ranks: the values of the prefix map, shared by all blocks with the same owners.

A set is a row of 64-bit words: three planes (device, host, store) with a bit for each life of a
rank's cache (rank_bits.py). It is counted by the keys that have it and freed with the last.

A set's hash is the exclusive or of its elements' hashes, so that of a set with one rank more or
less costs one step. Where to find a hash is kept in the INDEX column, one cell a hash: what is
displaced there may be made a second time, which costs a row, never a wrong answer.
"""

from __future__ import annotations

import numpy as np

from rtp.core.kernels import kernel
from rtp.core.master.key_table import number
from rtp.core.types import IntArray, UInt64Array

INDEX, HASH, REFS, FIRST = range(4)
"""Columns of `sets`: number of the set whose hash belongs to this row (nothing to do with the row's
own set), hash, number of keys, first word of the device plane."""
NOBODY, LIVES, NOW, FIRST_SET = range(4)
"""Rows of `sets`: the empty set; masks of lives as if they were planes (alive, prefix-closed, being
swept); those left in a match (device, held); the first that sets use."""
TALLY = FREE, USED, CELLS, EMPTIED, LAST, LAST_TURNED, LIMIT, REFUSED, COUNTED = range(9)
"""Of `tally`: first free row (its next: in column FIRST; 0: none), rows used ever, cells of the
index, sets in use without elements since they were swept, the last set that a call turned one
element of and what it became. Of keys: most there may be, how many did not fit; and what a call
tells about itself."""
NO_ROOM = NO_SET = -1
MOST_GROWTH_BYTES = 1 << 18
"""A call grows the rows by so much at most: new pages take their time, old ones do not move."""
PLANES = (0, 1, 2, 2)
"""Plane of an owner set for each Tier: what is neither on device nor on host is a hint."""

_A = np.uint64(0xBF58476D1CE4E5B9)
_B = np.uint64(0x94D049BB133111EB)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_27 = np.uint64(27)
_31 = np.uint64(31)
_ONE = np.uint64(1)


@kernel("u8(i8, u8)")
def hash_of(column: int, bit: np.uint64) -> np.uint64:
    """Of the element that is this bit of this column; bit: one of 64, in its place."""
    x = bit * _A + np.uint64(column) * _STEP
    x = (x ^ (x >> _27)) * _B
    return x ^ (x >> _31)


@kernel("u8(u8[:,::1], i8)")
def hash_of_set(sets: UInt64Array, which: int) -> np.uint64:
    """Worked out anew, for checks."""
    name = np.uint64(0)
    for column in range(FIRST, sets.shape[1]):
        word = sets[which, column]
        while word != 0:
            bit = word & (~word + _ONE)
            word ^= bit
            name ^= hash_of(column, bit)
    return name


@kernel("void(u8[:,::1], i8[::1], i8)")
def strip(sets: UInt64Array, tally: IntArray, which: int) -> None:
    """Takes the lives being swept out of a set."""
    words = (sets.shape[1] - FIRST) // 3
    name = sets[which, HASH]
    for column in range(FIRST, sets.shape[1]):
        swept = sets[LIVES, FIRST + 2 * words + (column - FIRST) % words]
        dead = sets[which, column] & swept
        sets[which, column] ^= dead
        while dead != 0:
            bit = dead & (~dead + _ONE)
            dead ^= bit
            name ^= hash_of(column, bit)
    if name == sets[which, HASH]:
        return
    sets[which, HASH] = name
    if name == 0:
        tally[EMPTIED] += 1
    else:
        sets[number(name & np.uint64(tally[CELLS] - 1)), INDEX] = np.uint64(which)


@kernel("i8(u8[:,::1], i8[::1], i8, i8)")
def strip_some(sets: UInt64Array, tally: IntArray, first: int, budget: int) -> int:
    """Does so with the next sets; returns which is next, the number of rows used at the end."""
    end = min(first + budget, int(tally[USED]))
    for which in range(first, end):
        if sets[which, REFS] != 0:
            strip(sets, tally, which)
    return end


@kernel("i8(u8[:,::1], i8[::1], i8, i8, u8)")
def turned(sets: UInt64Array, tally: IntArray, which: int, column: int, bit: np.uint64) -> int:
    """The set that differs from this one in one element; NO_ROOM where it needs a new row."""
    if which >= FIRST_SET:
        strip(sets, tally, which)  # so that no new set has what was swept from its like
    name = sets[which, HASH] ^ hash_of(column, bit)
    if name == 0:
        return NOBODY
    cell = number(name & np.uint64(tally[CELLS] - 1))
    known = number(sets[cell, INDEX])
    if known != 0 and sets[known, HASH] == name:
        same = sets[known, column] == sets[which, column] ^ bit
        for other in range(FIRST, sets.shape[1]):
            if other != column and sets[known, other] != sets[which, other]:
                same = False
        if same:
            return known
    made = int(tally[FREE])
    if made != 0:
        tally[FREE] = number(sets[made, FIRST])
    elif tally[USED] < len(sets):
        made = int(tally[USED])
        tally[USED] += 1
    else:
        return NO_ROOM
    for other in range(FIRST, sets.shape[1]):
        sets[made, other] = sets[which, other]
    sets[made, column] ^= bit
    sets[made, HASH] = name
    sets[cell, INDEX] = np.uint64(made)
    return made


@kernel("void(u8[:,::1], i8[::1], i8)")
def drop(sets: UInt64Array, tally: IntArray, which: int) -> None:
    """One key less has this set."""
    sets[which, REFS] -= _ONE
    if sets[which, REFS] == 0:
        if sets[which, HASH] == 0:
            tally[EMPTIED] -= 1
        sets[which, HASH] = 0
        tally[LAST] = NO_SET  # which may be this one, or have become it
        sets[which, FIRST] = np.uint64(tally[FREE])
        tally[FREE] = which


class OwnerSets:
    """The rows, and room for more; kernels change them."""

    __slots__ = ("rows", "tally", "words")

    def __init__(self, lives: int) -> None:
        """lives: how many bits a plane must have."""
        self.words = -(-lives // 64)
        self.rows: UInt64Array = np.zeros((64, FIRST + 3 * self.words), np.uint64)
        self.tally: IntArray = np.zeros(len(TALLY), np.int64)
        self.tally[USED], self.tally[CELLS] = FIRST_SET, len(self.rows)

    def __len__(self) -> int:
        """Rows in use."""
        return int(np.count_nonzero(self.rows[:, REFS]))

    @property
    def full(self) -> bool:
        return not self.tally.item(FREE) and self.tally.item(USED) == len(self.rows)

    def grow(self) -> None:
        size = self.rows.shape[1] * 8
        more = min(len(self.rows), max(1, MOST_GROWTH_BYTES // size))
        self.rows.resize((len(self.rows) + more, self.rows.shape[1]), refcheck=False)
        self.tally[CELLS] = 1 << (len(self.rows).bit_length() - 1)

    def plane(self, row: int, plane: int) -> UInt64Array:
        """[words], a view that holds until grow()."""
        first = FIRST + plane * self.words
        return self.rows[row, first : first + self.words]

    def check(self, values: IntArray) -> None:
        """values: the set of each key. Asserts what holds between calls."""
        used = self.tally.item(USED)
        counts = np.bincount(values, minlength=used)
        assert len(counts) == used
        assert not counts[:FIRST_SET].any()
        rows = self.rows[:used]
        assert np.array_equal(counts[FIRST_SET:], rows[FIRST_SET:, REFS])
        assert not rows[NOBODY, HASH:].any()
        emptied = 0
        for which in (counts > 0).nonzero()[0].tolist():
            assert hash_of_set(self.rows, which) == rows[which, HASH]
            emptied += not rows[which, HASH]
        assert emptied == self.tally.item(EMPTIED)
        num_free, free = 0, self.tally.item(FREE)
        while free:
            assert not counts[free]
            num_free, free = num_free + 1, int(rows[free, FIRST])
        assert num_free + np.count_nonzero(counts) + FIRST_SET == used

"""A hash table of 64-bit keys in arrays: one cache line a probe, and no call that stalls.

Rows are (key, value); value 0 is an empty slot, so every key can be one. Open addressing, linear
probing, deletion by shifting back. A table that has no room is doubled by a second one beside it:
each insertion moves a few of the old slots, in their order, so a key's place in that order tells
which of the two has it.

Two more rows end a table: (keys, shift of a hash to a slot), (slot where moving began, slots moved
since).
"""

from __future__ import annotations

import mmap

import numpy as np

from rtp.core.kernels import kernel
from rtp.core.types import UInt64Array

HEADER = 2
FIRST_SLOTS = 16
MOVES = 8
"""Slots moved by an insertion: all are, long before the new table is full."""
MIX = np.uint64(0x9E3779B97F4A7C15)
"""Odd; what it multiplies is spread over the top bits."""
ONE = np.uint64(1)
RELEASED_BYTES = 1 << 20
"""A call gives back so much of an old array: 0.1 ms; all of it at once would take milliseconds."""


@kernel("i8(u8)")
def number(word: np.uint64) -> int:
    """A word as a signed integer: an operation on both kinds would make a float."""
    return int(word)


@kernel("i8(u8[:,::1], u8)")
def home(slots: UInt64Array, key: np.uint64) -> int:
    """The slot where looking for a key begins."""
    return number((key * MIX) >> slots[len(slots) - HEADER, 1])


@kernel("i8(u8[:,::1], u8)")
def turn(old: UInt64Array, key: np.uint64) -> int:
    """Slots from where moving began to the key's home."""
    num = len(old) - HEADER
    return (home(old, key) - number(old[num + 1, 0])) & (num - 1)


@kernel("b1(u8[:,::1], u8)")
def left(old: UInt64Array, key: np.uint64) -> bool:
    """Whether this key, if it is anywhere, was not moved yet."""
    return bool(turn(old, key) >= number(old[len(old) - HEADER + 1, 1]))


@kernel("i8(u8[:,::1], u8)")
def find(slots: UInt64Array, key: np.uint64) -> int:
    """The key's slot, or ~slot where it would be put."""
    last = len(slots) - HEADER - 1
    at = home(slots, key)
    while slots[at, 1] != 0:
        if slots[at, 0] == key:
            return at
        at = (at + 1) & last
    return ~at


@kernel("u8(u8[:,::1], u8[:,::1], u8)")
def get(slots: UInt64Array, old: UInt64Array, key: np.uint64) -> np.uint64:
    """The key's value, 0 if there is none."""
    table = old if left(old, key) else slots
    at = find(table, key)
    return table[at, 1] if at >= 0 else np.uint64(0)


@kernel("b1(u8[:,::1])")
def full(slots: UInt64Array) -> bool:
    """Three quarters full: longer probes from here on. The shared empty table always is."""
    num = len(slots) - HEADER
    return bool(num < FIRST_SLOTS or number(slots[num, 0]) >= num - num // 4)


@kernel("void(u8[:,::1], i8, u8, u8)")
def put(slots: UInt64Array, at: int, key: np.uint64, value: np.uint64) -> None:
    """at: an empty slot, as find() told it."""
    slots[at, 0] = key
    slots[at, 1] = value
    slots[len(slots) - HEADER, 0] += ONE


@kernel("void(u8[:,::1], i8)")
def erase(slots: UInt64Array, at: int) -> None:
    """Empties a slot; those behind it that it kept from their home move up."""
    last = len(slots) - HEADER - 1
    after = (at + 1) & last
    while slots[after, 1] != 0:
        if (after - home(slots, slots[after, 0])) & last >= (after - at) & last:
            slots[at, 0] = slots[after, 0]
            slots[at, 1] = slots[after, 1]
            at = after
        after = (after + 1) & last
    slots[at, 1] = 0
    slots[last + 1, 0] -= ONE


@kernel("void(u8[:,::1])")
def begin_moving(old: UInt64Array) -> None:
    """From an empty slot on, so that no run of keys is cut by the end of the array."""
    at = 0
    while old[at, 1] != 0:
        at += 1
    last = len(old) - HEADER
    old[last + 1, 0] = np.uint64(at)
    old[last + 1, 1] = 0


@kernel("void(u8[:,::1], u8[:,::1], i8)")
def move(slots: UInt64Array, old: UInt64Array, budget: int) -> None:
    """Moves what is in the next `budget` slots of the old table, and the run of keys to its end.
    Keys that came round to where moving began, from the end of the array, wait for their turn."""
    num = len(old) - HEADER
    moved = number(old[num + 1, 1])
    at = (number(old[num + 1, 0]) + moved) & (num - 1)
    while (budget > 0 or old[at, 1] != 0) and (moved < num or old[num, 0] != 0):
        key = old[at, 0]
        if old[at, 1] != 0 and turn(old, key) <= moved:
            put(slots, ~find(slots, key), key, old[at, 1])
            old[at, 1] = 0
            old[num, 0] -= ONE
        at = (at + 1) & (num - 1)
        moved += 1
        budget -= 1
    old[num + 1, 1] = np.uint64(moved)


@kernel("i8(u8[:,::1], u8[:,::1])")
def misplaced(slots: UInt64Array, old: UInt64Array) -> int:
    """Keys that would not be found where they are; for checks."""
    count = 0
    for is_old in range(2):
        table = old if is_old else slots
        for at in range(len(table) - HEADER):
            key = table[at, 0]
            if table[at, 1] != 0 and (find(table, key) != at or left(old, key) != bool(is_old)):
                count += 1
    return count


def a_table(num: int, memory: mmap.mmap | None = None) -> UInt64Array:
    """[num + HEADER, 2], num a power of two. memory: zeros, if not its own."""
    shape = num + HEADER, 2
    slots: UInt64Array = (
        np.zeros(shape, np.uint64) if memory is None else np.ndarray(shape, np.uint64, memory)
    )
    slots[num, 1] = 65 - num.bit_length()
    return slots


EMPTY = a_table(2)
"""What all tables without keys share; nothing is put there."""
EMPTY[3, 1] = 2  # all of it was moved


def grown(slots: UInt64Array) -> UInt64Array:
    """A table of twice the size with the same keys. O(keys): for small ones."""
    larger = a_table(max(FIRST_SLOTS, 2 * (len(slots) - HEADER)))
    if slots is not EMPTY:
        begin_moving(slots)
        move(larger, slots, len(slots))
    return larger


def num_keys(slots: UInt64Array) -> int:
    return int(slots[-HEADER, 0])


class KeyTable:
    """Two arrays that are one table; `old` is EMPTY but while the table grows.

    A large one begins in pages of 4 KB that take memory when they are used, for a page of 2 MB may
    cost milliseconds to whoever comes first; once it is filled the system may join them."""

    __slots__ = ("_memory", "_old_memory", "_released", "old", "slots")

    def __init__(self) -> None:
        self.slots = self.old = EMPTY
        self._memory: mmap.mmap | None = None
        self._old_memory: mmap.mmap | None = None
        self._released = 0

    def __len__(self) -> int:
        return num_keys(self.slots) + num_keys(self.old)

    def grow(self) -> None:
        """Makes room; what is there moves with later insertions."""
        if self.slots is not EMPTY:
            move(self.slots, self.old, len(self.old))
            self.old, self._old_memory, self._released = self.slots, self._memory, 0
            begin_moving(self.old)
        num = max(FIRST_SLOTS, 2 * (len(self.slots) - HEADER))
        size = (num + HEADER) * self.slots.itemsize * 2
        self._memory = None
        if size > RELEASED_BYTES:
            self._memory = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.slots = a_table(num, self._memory)

    def forget_moved(self) -> None:
        """To be called now and then while there is an old array: gives it back once it is empty, a
        part a call."""
        if num_keys(self.old):
            return
        size = self.old.nbytes
        self.old[-1, 1] = len(self.old) - HEADER
        if self._old_memory is not None and self._released + RELEASED_BYTES < size:
            self._old_memory.madvise(mmap.MADV_DONTNEED, self._released, RELEASED_BYTES)
            self._released += RELEASED_BYTES
        else:
            self.old, self._old_memory = EMPTY, None
            if self._memory is not None and hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)

    def entries(self) -> UInt64Array:
        """[keys, 2] keys and values, a copy in no order. O(slots)."""
        both = np.concatenate([self.slots[:-HEADER], self.old[:-HEADER]])
        found: UInt64Array = both[both[:, 1] != 0]
        return found

    def check(self) -> None:
        """Asserts what holds between calls. O(slots)."""
        for slots in (self.slots, self.old):
            assert num_keys(slots) == np.count_nonzero(slots[:-HEADER, 1])
        entries = self.entries()
        assert len(np.unique(entries[:, 0])) == len(entries)
        assert not misplaced(self.slots, self.old)

"""The loops of the prefix map over blocks: own and disown, arrive and settle, match, purge.

`hashes` are 16 bytes a block, of which the last 8 are its key. `slots` and `old` are the table of
keys (key_table.py), its values rows of `sets`; `tally` counts (owner_sets.py). `pending` is the
table of one rank's arrivals: value = arrivals not confirmed + 2^32 * those confirmed.

What changes the map goes on from block `at` and returns ALL, or the block where a table has no
room, to be called again from there when it has. Some 0.1 us a block, mostly cache misses.
"""

from __future__ import annotations

import numpy as np

from rtp.core.kernels import kernel
from rtp.core.master.key_table import (
    HEADER,
    MOVES,
    erase,
    find,
    full,
    get,
    left,
    move,
    number,
    put,
)
from rtp.core.master.owner_sets import (
    COUNTED,
    FIRST,
    HASH,
    LAST,
    LAST_TURNED,
    LIMIT,
    LIVES,
    NO_ROOM,
    NO_SET,
    NOBODY,
    NOW,
    REFS,
    REFUSED,
    drop,
    turned,
)
from rtp.core.types import HASH_BYTES, FloatArray, Hashes, IntArray, UInt64Array

REFUSAL, DONE, SAME = range(3)
"""What own() did, unless NO_ROOM."""
ALL = -1
CHANGES = (
    "i8(Bytes(u1, 1, 'C', readonly=True), i8, u8[:,::1], u8[:,::1], u8[:,::1], u8[:,::1], i8[::1],"
    " i8, i8)"
)
FIRST_JUMP = 16
GALLOP = 4
"""Blocks between the first probes of a match, and by how much that grows."""
TRAIL = 64
"""Probes ahead of what is known: a match's gallop and bisection leave fewer."""

_0 = np.uint64(0)
_1 = np.uint64(1)
_8 = np.uint64(8)
_32 = np.uint64(32)
_58 = np.uint64(58)
WAITING = np.uint64((1 << 32) - 1)
"""Those bits of a value in `pending` that count arrivals not confirmed."""
_CONFIRMED = np.uint64(1 << 32)
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_PLACES = np.zeros(64, np.int64)
for _place in range(64):
    _PLACES[((0x03F79D71B4CB0A89 << _place) & ((1 << 64) - 1)) >> 58] = _place


@kernel("u8(Bytes(u1, 1, 'C', readonly=True), i8)")
def key_at(hashes: Hashes, block: int) -> np.uint64:
    end = block * HASH_BYTES + HASH_BYTES
    key = _0
    for _ in range(8):
        end -= 1
        key = (key << _8) | np.uint64(hashes[end])
    return key


@kernel("Tuple((i8, u8))(u8[:,::1], i8, i8)")
def element(sets: UInt64Array, life: int, plane: int) -> tuple[int, np.uint64]:
    """Column and bit of a life on a plane."""
    words = (sets.shape[1] - FIRST) // 3
    return FIRST + plane * words + (life >> 6), _1 << np.uint64(life & 63)


@kernel("i8(u8[:,::1], u8[:,::1], u8[:,::1], i8[::1], u8, i8, u8, b1)")
def own(
    slots: UInt64Array,
    old: UInt64Array,
    sets: UInt64Array,
    tally: IntArray,
    key: np.uint64,
    column: int,
    bit: np.uint64,
    on: bool,
) -> int:
    """One owner more (on) or less of a block; a block without owners goes."""
    table = old if left(old, key) else slots
    at = find(table, key)
    was = number(table[at, 1]) if at >= 0 else NOBODY
    if was == NOBODY:
        if not on:
            return SAME
        if number(slots[len(slots) - HEADER, 0] + old[len(old) - HEADER, 0]) >= tally[LIMIT]:
            tally[REFUSED] += 1
            return REFUSAL
        if full(slots):
            return NO_ROOM
    if ((sets[was, column] & bit) != 0) == on:
        return SAME
    if was == tally[LAST]:  # as the block before: most have the owners of their neighbour
        now = int(tally[LAST_TURNED])
    else:
        now = turned(sets, tally, was, column, bit)
        if now == NO_ROOM:
            return NO_ROOM
        tally[LAST], tally[LAST_TURNED] = was, now
    if now != NOBODY:
        sets[now, REFS] += _1
    if was == NOBODY:
        put(table, ~at, key, np.uint64(now))
        move(slots, old, MOVES)
        return DONE
    drop(sets, tally, was)
    if now == NOBODY:
        erase(table, at)
    else:
        table[at, 1] = np.uint64(now)
    return DONE


@kernel(CHANGES)
def change(
    hashes: Hashes,
    at: int,
    slots: UInt64Array,
    old: UInt64Array,
    pending: UInt64Array,
    sets: UInt64Array,
    tally: IntArray,
    life: int,
    what: int,
) -> int:
    """The rank holds these blocks now, or no longer. What was arriving is confirmed by the one, and
    stays in spite of the other. what: 2 * plane + 1 if it holds them. pending: of the device;
    elsewhere an empty table."""
    column, bit = element(sets, life, what >> 1)
    on = what & 1 != 0
    tally[LAST] = NO_SET
    waits = pending[len(pending) - HEADER, 0] != 0
    for block in range(at, len(hashes) // HASH_BYTES):
        key = key_at(hashes, block)
        if waits:
            place = find(pending, key)
            if place >= 0:
                waiting = pending[place, 1] & WAITING
                if waiting != 0:
                    if on:
                        confirmed = pending[place, 1] >> _32
                        pending[place, 1] = (confirmed + waiting) << _32
                    continue  # it is credited already
        if own(slots, old, sets, tally, key, column, bit, on) == NO_ROOM:
            return block
    return ALL


@kernel(CHANGES)
def arrive(
    hashes: Hashes,
    at: int,
    slots: UInt64Array,
    old: UInt64Array,
    pending: UInt64Array,
    sets: UInt64Array,
    tally: IntArray,
    life: int,
    held: int,
) -> int:
    """These blocks from `held` on will be computed on the rank, and those before that still arrive
    there: they lie behind what it has. tally[COUNTED]: the first that counts."""
    column, bit = element(sets, life, 0)
    tally[LAST] = NO_SET
    num = len(hashes) // HASH_BYTES
    if at == 0:
        at = max(0, min(held, num))
        while at > 0:
            place = find(pending, key_at(hashes, at - 1))
            if place < 0 or pending[place, 1] & WAITING == 0:
                break
            at -= 1
        tally[COUNTED] = at
    for block in range(at, num):
        key = key_at(hashes, block)
        place = find(pending, key)
        if place >= 0 and pending[place, 1] & WAITING != 0:
            pending[place, 1] += _1
            continue
        if place < 0 and full(pending):
            return block
        found = own(slots, old, sets, tally, key, column, bit, True)
        if found == NO_ROOM:
            return block
        if found != REFUSAL:
            one = _CONFIRMED if found == SAME else _1
            if place < 0:
                put(pending, ~place, key, one)
            else:
                pending[place, 1] += one
    return ALL


@kernel(CHANGES)
def settle(
    hashes: Hashes,
    at: int,
    slots: UInt64Array,
    old: UInt64Array,
    pending: UInt64Array,
    sets: UInt64Array,
    tally: IntArray,
    life: int,
    _: int,
) -> int:
    """One arrival of each block is over: a confirmed one if there is any; with the last that is not
    the rank's credit for the block goes."""
    column, bit = element(sets, life, 0)
    tally[LAST] = NO_SET
    for block in range(at, len(hashes) // HASH_BYTES):
        key = key_at(hashes, block)
        place = find(pending, key)
        if place < 0:
            continue
        if pending[place, 1] >= _CONFIRMED:
            pending[place, 1] -= _CONFIRMED
        else:
            last = pending[place, 1] == _1
            if last and own(slots, old, sets, tally, key, column, bit, False) == NO_ROOM:
                return block
            pending[place, 1] -= _1
        if pending[place, 1] == 0:
            erase(pending, place)
    return ALL


@kernel("i8(u8[:,::1], i8, i8, u8[:,::1], i8[::1])")
def purge(slots: UInt64Array, at: int, budget: int, sets: UInt64Array, tally: IntArray) -> int:
    """Takes keys whose sets lost all their elements out of the next slots; returns which is
    next."""
    end = min(at + budget, len(slots) - HEADER)
    while at < end:
        which = number(slots[at, 1])
        if which != NOBODY and sets[which, HASH] == 0:
            drop(sets, tally, which)
            erase(slots, at)  # another key may be there now
        else:
            at += 1
    return end


@kernel("b1(u8[:,::1], i8)")
def somebody(sets: UInt64Array, which: int) -> bool:
    """Whether anyone alive is in this set."""
    words = (sets.shape[1] - FIRST) // 3
    any_of = _0
    for i in range(FIRST, FIRST + words):
        owners = sets[which, i] | sets[which, i + words] | sets[which, i + 2 * words]
        any_of |= owners & sets[LIVES, i]
    return bool(any_of != 0)


@kernel("b1(u8[:,::1], i8)")
def closed(sets: UInt64Array, which: int) -> bool:
    """Whether somebody alive holds it, and all of those promised prefix-closed holdings."""
    words = (sets.shape[1] - FIRST) // 3
    any_of, open_ones = _0, _0
    for i in range(FIRST, FIRST + words):
        held = (sets[which, i] | sets[which, i + words]) & sets[LIVES, i]
        any_of |= held
        open_ones |= held & ~sets[LIVES, i + words]
    return bool(any_of != 0 and open_ones == 0)


@kernel("b1(u8[:,::1], i8, i8)")
def alike(sets: UInt64Array, one: int, other: int) -> bool:
    """Whether the same ranks alive hold it on device, and on device or host."""
    words = (sets.shape[1] - FIRST) // 3
    unlike = _0
    for i in range(FIRST, FIRST + words):
        alive = sets[LIVES, i]
        device = sets[one, i] ^ sets[other, i]
        held = (sets[one, i] | sets[one, i + words]) ^ (sets[other, i] | sets[other, i + words])
        unlike |= (device | held) & alive
    return bool(unlike == 0)


@kernel("void(u8, i8, i8, i8[::1], f8[::1])")
def end_at(ranks: np.uint64, first: int, depth: int, rank_of: IntArray, column: FloatArray) -> None:
    """Writes the depth into the rows of these ranks; first: which life is bit 0."""
    while ranks != 0:
        bit = ranks & (~ranks + _1)
        ranks ^= bit
        column[rank_of[first + _PLACES[number((bit * _DE_BRUIJN) >> _58)]]] = depth


@kernel("b1(u8[:,::1], i8, i8, i8[::1], f8[::1], f8[::1], b1)")
def narrow(
    sets: UInt64Array,
    which: int,
    depth: int,
    rank_of: IntArray,
    device: FloatArray,
    host: FloatArray,
    apart: bool,
) -> bool:
    """Those who hold this block too are left in the match; the others' rows end at this depth.
    apart: whether host differs from device; until it does, only device is written."""
    words = (sets.shape[1] - FIRST) // 3
    if not apart:
        difference = _0
        for i in range(FIRST, FIRST + words):
            difference |= sets[NOW, i] & sets[which, i + words] & ~sets[which, i]
        if difference != 0:
            apart = True
            for row in range(len(device)):
                host[row] = device[row]
    for i in range(FIRST, FIRST + words):
        gone = sets[NOW, i] & ~sets[which, i]
        sets[NOW, i] ^= gone
        if depth:
            end_at(gone, (i - FIRST) * 64, depth, rank_of, device)
        gone = sets[NOW, i + words] & ~(sets[which, i] | sets[which, i + words])
        sets[NOW, i + words] ^= gone
        if depth and apart:
            end_at(gone, (i - FIRST) * 64, depth, rank_of, host)
    return apart


@kernel(
    "i8(Bytes(u1, 1, 'C', readonly=True), u8[:,::1], u8[:,::1], u8[:,::1], i8[:,::1], i8[::1],"
    " f8[::1], f8[::1])"
)
def match(
    hashes: Hashes,
    slots: UInt64Array,
    old: UInt64Array,
    sets: UInt64Array,
    trail: IntArray,
    rank_of: IntArray,
    device: FloatArray,
    host: FloatArray,
) -> int:
    """Returns 2 * the leading blocks somebody holds, + 1 where host differs from device.

    device: zeros [capacity], or [0] where columns are not asked for; host: like it, written only
    where it differs. trail: scratch, [TRAIL, 2].

    Where the owners of a block hold prefix-closed, those who own both ends of a span own all of it,
    and whoever else owns its far end lacks the near one: so the pass gallops while owners are the
    same, then bisects; what it probed on the way waits in the trail. Elsewhere it walks.
    """
    num = len(hashes) // HASH_BYTES
    words = (sets.shape[1] - FIRST) // 3
    columns = len(device) > 0
    if columns:
        for i in range(FIRST, FIRST + words):
            sets[NOW, i] = sets[NOW, i + words] = sets[LIVES, i]
    at, top, step, apart = 0, 0, FIRST_JUMP, False
    owners = number(get(slots, old, key_at(hashes, 0))) if num else NOBODY
    while owners != NOBODY and somebody(sets, owners):
        if columns:
            apart = narrow(sets, owners, at, rank_of, device, host, apart)
        jumps = closed(sets, owners)
        run = owners
        while owners == run:
            if top and (jumps or trail[top - 1, 0] == at + 1):
                top -= 1
                probe, found = trail[top, 0], trail[top, 1]
            elif at + 1 == num:
                at, owners = num, NOBODY
                break
            else:
                probe = at + 1
                if jumps:
                    probe = min(at + step, num - 1)
                    step *= GALLOP
                found = number(get(slots, old, key_at(hashes, probe)))
            while found != run and (
                found == NOBODY or not alike(sets, found, run) or not somebody(sets, found)
            ):
                if probe == at + 1:
                    owners = found
                    break
                trail[top, 0], trail[top, 1] = probe, found
                top += 1
                probe = (at + probe) // 2
                found = number(get(slots, old, key_at(hashes, probe)))
            at = probe
    if columns:
        for i in range(FIRST, FIRST + words):
            end_at(sets[NOW, i], (i - FIRST) * 64, at, rank_of, device)
            if apart:
                end_at(sets[NOW, i + words], (i - FIRST) * 64, at, rank_of, host)
    return 2 * at + apart

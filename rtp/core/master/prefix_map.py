"""The unified prefix map: which ranks hold which blocks, in which tier; how far a prompt matches.

Key -> interned owner set (owner_sets.py), in one table of arrays (key_table.py). One pass over a
prompt's keys intersects owner sets, so it answers for every rank at once; it costs O(blocks probed
+ distinct owner sets), however many ranks. The passes are compiled (prefix_kernels.py).

A rank has a bit for one life of its cache (rank_bits.py). Losing the rank, or all its keys, takes
the bit out of the mask of living ones that every match applies; `sweep` later takes dead bits out
of the owner sets, and then keys without owners out of the table, in slices. So dropping a million
keys is one AND, and a rank that was cleared can be filled again at once, under a new bit.

Blocks of a granted request count as held on device from `arrive` on, so that concurrent equal
prefixes meet. An arrival is pending until the rank confirms the block by `add`; `settle` takes it
back. The map is a hint: it knows 64 of 128 hash bits, and the chosen worker checks them all.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from rtp.core.master import prefix_kernels as kernels
from rtp.core.master.key_table import EMPTY, HEADER, KeyTable, full, get, grown, num_keys
from rtp.core.master.owner_sets import (
    COUNTED,
    EMPTIED,
    FIRST,
    FIRST_SET,
    LIMIT,
    LIVES,
    NOW,
    PLANES,
    REFUSED,
    USED,
    OwnerSets,
    strip_some,
)
from rtp.core.master.rank_bits import NO_BIT, RankBits, num_lives
from rtp.core.types import HASH_BYTES, BoolArray, FloatArray, Hashes, Tier

DEVICE = Tier.DEVICE
REMOVED = [2 * plane for plane in PLANES]
ADDED = [2 * plane + 1 for plane in PLANES]
KEPT_SLOTS = 256
"""A rank's table of arrivals is kept when they are over, unless it is larger."""
NOTHING = np.zeros(0)


class Match(msgspec.Struct, frozen=True, gc=False, eq=False):
    """How many leading blocks of a prompt are held, per rank and anywhere. Counts of blocks."""

    device: FloatArray
    """[capacity]: on the rank's device, or arriving there."""
    host: FloatArray
    """[capacity]: on the rank's device or host; >= device. `device` itself where they are equal."""
    best: int
    """Leading blocks each of which somebody holds, in any tier."""


class PrefixMap:
    """Owners of blocks for ranks 0 .. capacity-1; at most `max_blocks` keys, more are refused.

    Some 40 bytes per key, and capacity / 2 per distinct owner set. A call costs about 0.5 us, and
    0.05 us per hash.
    """

    def __init__(self, capacity: int, max_blocks: int = 4_000_000) -> None:
        self.capacity = capacity
        self._keys = KeyTable()
        self._sets = OwnerSets(num_lives(capacity))
        self._sets.tally[LIMIT] = max_blocks
        self._bits = RankBits(capacity, self._sets)
        self._bit_of = self._bits.bit_of
        self._pending = [EMPTY] * capacity
        """Per rank: a table of arrivals, as the kernels use it."""
        self._trail = np.zeros((kernels.TRAIL, 2), np.int64)
        self._host = np.zeros(capacity)
        self._swept_sets = FIRST_SET
        self._purged_slots = 0

    @property
    def num_blocks(self) -> int:
        """Keys in the map, those of dead lives that sweep has not reached included."""
        return len(self._keys)

    @property
    def num_refused(self) -> int:
        """Keys that did not fit, ever."""
        return self._sets.tally.item(REFUSED)

    # ---------------------------------------------------------------- what ranks report

    def add(self, rank: int, hashes: Hashes, tier: Tier) -> None:
        """The rank holds these blocks in this tier. On device this confirms their arrivals."""
        if hashes:
            self._run(kernels.change, rank, hashes, tier is DEVICE, ADDED[tier])

    def remove(self, rank: int, hashes: Hashes, tier: Tier) -> None:
        """The rank no longer holds these blocks in this tier; pending arrivals stay."""
        if hashes and self._bit_of[rank] != NO_BIT:
            self._run(kernels.change, rank, hashes, tier is DEVICE, REMOVED[tier])

    def promise(self, rank: int, prefix_closed: bool) -> None:
        """Whether each block this rank holds (on device; on device or host) has its whole prefix
        there too, because tails leave first. Where all owners promise, a match jumps instead of
        walking. Holds until drop_rank; no promise before."""
        self._bits.promise(rank, prefix_closed)

    # ---------------------------------------------------------------- what the Master expects

    def arrive(self, rank: int, hashes: Hashes, held: int = 0) -> Hashes:
        """A granted request will compute these blocks on the rank. Returns those that count, which
        are to be settled once.

        Pass the prompt's hashes from block 0 on, so that a promised holding stays prefix-closed.
        held: leading blocks that matched there. Of those only what is still arriving counts once
        more; what the rank has needs nobody's promise.
        """
        self._run(kernels.arrive, rank, hashes, True, held)
        return hashes[self._sets.tally.item(COUNTED) * HASH_BYTES :]

    def settle(self, rank: int, hashes: Hashes) -> None:
        """Takes back one arrival of each block; blocks neither confirmed nor still awaited go.

        Of two arrivals of a block with one confirmed, the first to settle is taken for that one;
        when both have settled nothing is left. After drop_rank it does nothing.
        """
        pending = self._pending[rank]
        if pending is EMPTY:
            return
        self._run(kernels.settle, rank, hashes, True, 0)
        if len(pending) > KEPT_SLOTS and not num_keys(pending):
            self._pending[rank] = EMPTY

    # ---------------------------------------------------------------- ranks that come and go

    def drop_rank(self, rank: int) -> None:
        """The rank is gone: no credit from now on, arrivals and promise forgotten. O(1)."""
        self._bits.retire(rank)
        self._bits.promise(rank, False)
        self._pending[rank] = EMPTY

    def clear_rank(self, rank: int) -> None:
        """The rank holds nothing any more; what is arriving still arrives. O(pending arrivals)."""
        self._bits.retire(rank)
        entries = self._pending[rank][:-HEADER]
        arriving = entries[entries[:, 1] & kernels.WAITING != 0]
        if len(arriving):
            arriving[:, 1] = arriving[:, 0]  # a hash ends with its key
            self._run(kernels.change, rank, arriving.tobytes(), False, ADDED[DEVICE])

    def sweep(self, budget: int) -> bool:
        """Goes over up to `budget` owner sets and slots for keys, 10 ns each, and takes dead lives
        out of the ones and what they alone held out of the others. True when nothing is left."""
        bits, sets, keys = self._bits, self._sets, self._keys
        while budget > 0 and (bits.sweeping or bits.dead):
            budget = self._sweep_sets(budget)
        while budget > 0 and sets.tally.item(EMPTIED):
            table, first = keys.slots, self._purged_slots
            if first >= len(table) - HEADER:
                table, first = keys.old, first - (len(table) - HEADER)
            if first >= len(table) - HEADER:
                self._purged_slots = 0
                continue
            end = kernels.purge(table, first, budget, sets.rows, sets.tally)
            self._purged_slots += end - first
            budget -= end - first
        keys.forget_moved()
        return not (bits.sweeping or bits.dead or sets.tally.item(EMPTIED))

    # ---------------------------------------------------------------- how far a prompt matches

    def match(self, hashes: Hashes) -> Match:
        """One pass for all ranks: some 2 us for 32 blocks, 5 us for 2,000 with promises."""
        device = np.zeros(self.capacity)
        found = self._match(hashes, device, self._host)
        return Match(device, self._host.copy() if found & 1 else device, found >> 1)

    def best(self, hashes: Hashes) -> int:
        """Match.best alone: 1 us."""
        return self._match(hashes, NOTHING, NOTHING) >> 1

    def _match(self, hashes: Hashes, device: FloatArray, host: FloatArray) -> int:
        keys = self._keys
        return kernels.match(
            hashes, keys.slots, keys.old, self._sets.rows, self._trail, self._bits.rank_of,
            device, host,
        )  # fmt: skip

    # ---------------------------------------------------------------- owner sets of blocks

    def _run(
        self, kernel: Callable[..., int], rank: int, hashes: Hashes, arrivals: bool, what: int
    ) -> None:
        """One of the kernels that change the map. arrivals: it is about those of the rank too."""
        life = self._bit_of[rank]
        if life == NO_BIT:
            life = self._begin_life(rank)
        keys, sets = self._keys, self._sets
        at = 0
        while True:
            pending = self._pending[rank] if arrivals else EMPTY
            at = kernel(
                hashes, at, keys.slots, keys.old, pending, sets.rows, sets.tally, life, what
            )
            if at == kernels.ALL:
                break
            if full(keys.slots):
                keys.grow()
            if sets.full:
                sets.grow()
            if arrivals and full(pending):
                self._pending[rank] = grown(pending)
        if keys.old is not EMPTY:
            keys.forget_moved()

    def _begin_life(self, rank: int) -> int:
        while not self._bits.free:
            self._sweep_sets(self._sets.tally.item(USED))
        return self._bits.begin(rank)

    def _sweep_sets(self, budget: int) -> int:
        """Returns what is left of the budget."""
        bits, sets = self._bits, self._sets
        if not bits.sweeping:
            bits.begin_sweep()
            self._swept_sets = FIRST_SET
        end = strip_some(sets.rows, sets.tally, self._swept_sets, budget)
        budget -= max(1, end - self._swept_sets)
        self._swept_sets = end
        if end == sets.tally.item(USED):
            bits.end_sweep()
        return budget

    # ---------------------------------------------------------------- to look at it

    def holds(self, rank: int, key: int, tier: Tier) -> bool:
        """Whether this rank is credited with this block in exactly this tier (or its like)."""
        which = get(self._keys.slots, self._keys.old, np.uint64(key))
        return bool(self._owned(rank, tier)[int(which)])

    def keys(self, rank: int, tier: Tier) -> list[int]:
        """What this rank is credited with in this tier, ascending. O(blocks)."""
        keys, which = self._keys.entries().T
        found: list[int] = np.sort(keys[self._owned(rank, tier)[which.astype(np.int64)]]).tolist()
        return found

    def num_arriving(self) -> int:
        """Blocks with unsettled arrivals, over all ranks; 0 when no request is under way."""
        return sum(num_keys(pending) for pending in self._pending if pending is not EMPTY)

    def check(self) -> None:
        """Asserts what holds between calls, recounted from the arrays. O(blocks)."""
        self._bits.check()
        self._keys.check()
        assert self.num_blocks <= self._sets.tally.item(LIMIT)
        self._sets.check(self._keys.entries()[:, 1].astype(np.int64))
        for rank, pending in enumerate(self._pending):
            if pending is not EMPTY:
                table = KeyTable()
                table.slots = pending
                table.check()
                keys, counts = table.entries().T
                credited = self.keys(rank, Tier.DEVICE)
                assert np.isin(keys[counts & kernels.WAITING != 0], credited).all()

    def _owned(self, rank: int, tier: Tier) -> BoolArray:
        """[rows of owner sets] whether the rank is in the set."""
        life = self._bits.bit_of[rank]
        if life == NO_BIT:
            return np.zeros(len(self._sets.rows), np.bool_)
        words = self._sets.rows[:, FIRST + PLANES[tier] * self._sets.words + (life >> 6)]
        owned: BoolArray = (words >> np.uint64(life & 63)) & np.uint64(1) != 0
        owned[LIVES] = owned[NOW] = False
        return owned

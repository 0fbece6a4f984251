"""The unified prefix map: which ranks hold which blocks, in which tier; how far a prompt matches.

Key -> interned owner set (owner_sets.py), in 256 dicts: a growing dict stops the world while it is
rebuilt, a 256th of it does not. One pass over a prompt's keys intersects owner sets, so it answers
for every rank at once; it costs O(blocks probed + distinct owner sets), however many ranks.

A rank has a bit for one life of its cache (rank_bits.py). Losing the rank, or all its keys, takes
the bit out of the `alive` mask that every match applies; `sweep` later takes dead bits out of the
owner sets, in slices. So dropping a million keys is one AND, and a rank that was cleared can be
filled again at once, under a new bit.

Blocks of a granted request count as held on device from `arrive` on, so that concurrent equal
prefixes meet. An arrival is pending until the rank confirms the block by `add`; `settle` takes it
back. The map is a hint: it knows 64 of 128 hash bits, and the chosen worker checks them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rtp.core.hashing import low64
from rtp.core.master.owner_sets import PLANES, OwnerSet, OwnerSets
from rtp.core.master.rank_bits import RankBits, Runs
from rtp.core.types import FloatArray, Hashes, Tier

NUM_SHARDS = 256
SHIFT = 56
"""The top bits choose the shard; the low ones choose a slot inside its dict so must vary."""
FIRST_JUMP = 16
GALLOP = 4
"""Blocks between the first probes, and by how much that grows."""


class Match(msgspec.Struct, frozen=True, gc=False, eq=False):
    """How many leading blocks of a prompt are held, per rank and anywhere. Counts of blocks."""

    device: FloatArray
    """[capacity]: on the rank's device, or arriving there."""
    host: FloatArray
    """[capacity]: on the rank's device or host; >= device."""
    best: int
    """Leading blocks each of which somebody holds, in any tier."""


class PrefixMap:
    """Owners of blocks for ranks 0 .. capacity-1; at most `max_blocks` keys, more are refused.

    About 100 bytes per key. add, remove, arrive and settle cost about 1 us per hash.
    """

    def __init__(self, capacity: int, max_blocks: int = 4_000_000) -> None:
        self.capacity = capacity
        self.max_blocks = max_blocks
        self.num_blocks = 0
        """Keys in the map, those of dead lives that sweep has not reached included."""
        self.version = 0
        """Goes up with whatever may change a match."""
        self.num_refused = 0
        """Keys that did not fit, ever."""
        self._shards: list[dict[int, OwnerSet]] = [{} for _ in range(NUM_SHARDS)]
        self._sets = OwnerSets()
        self._bits = RankBits(capacity)
        self._pending: list[dict[int, int]] = [{} for _ in range(capacity)]
        self._confirmed: list[dict[int, int]] = [{} for _ in range(capacity)]
        self._alone: list[list[OwnerSet | None]] = [[None] * len(Tier) for _ in range(capacity)]
        self._sweep_shard = NUM_SHARDS
        self._sweep_keys: list[int] = []

    # ---------------------------------------------------------------- what ranks report

    def add(self, rank: int, hashes: Hashes | Sequence[int], tier: Tier) -> None:
        """The rank holds these blocks in this tier. On device this confirms their arrivals."""
        if not hashes:
            return
        keys = _keys(hashes)
        pending = self._pending[rank]
        if pending and tier is Tier.DEVICE:
            confirmed = self._confirmed[rank]
            fresh = []
            for key in keys:
                count = pending.pop(key, 0)
                if count:
                    confirmed[key] = confirmed.get(key, 0) + count
                else:
                    fresh.append(key)
            keys = fresh  # what was arriving is credited already
        self._set(keys, rank, tier)

    def remove(self, rank: int, hashes: Hashes | Sequence[int], tier: Tier) -> None:
        """The rank no longer holds these blocks in this tier; pending arrivals stay."""
        if not hashes:
            return
        keys = _keys(hashes)
        pending = self._pending[rank]
        if pending and tier is Tier.DEVICE:
            keys = [key for key in keys if key not in pending]
        self._unset(keys, rank, tier)

    def promise(self, rank: int, prefix_closed: bool) -> None:
        """Whether each block this rank holds (on device; on device or host) has its whole prefix
        there too, because tails leave first. Where all owners promise, a match jumps instead of
        walking. Holds until drop_rank; no promise before."""
        self.version += 1
        self._bits.promise(rank, prefix_closed)

    # ---------------------------------------------------------------- what the Master expects

    def arrive(self, rank: int, hashes: Hashes | Sequence[int], held: int = 0) -> list[int]:
        """A granted request will compute these blocks on the rank. Returns keys; settle them once.

        Pass the prompt's hashes from block 0 on, so that a promised holding stays prefix-closed.
        held: leading blocks that matched there. Of those only what is still arriving counts once
        more; what the rank has needs nobody's promise.
        """
        pending, confirmed = self._pending[rank], self._confirmed[rank]
        keys = _keys(hashes)
        bit, shards = self._bits.of(rank), self._shards
        first = held
        if pending and self._bits.closed & bit:
            # What arrives lies behind what is there: an earlier tail had its whole prefix.
            while first and keys[first - 1] in pending:
                first -= 1
            again = list(keys[first:held])
        else:
            again = [key for key in keys[:held] if key in pending] if pending else []
        for key in again:
            pending[key] += 1
        fresh = list(keys[held:])
        alone, shared, num_blocks = self._alone_on(rank, Tier.DEVICE), [], self.num_blocks
        for key in fresh:
            if key in pending:
                pending[key] += 1
                continue
            shard = shards[key >> SHIFT]
            owners = shard.get(key)
            if owners is None:
                if num_blocks < self.max_blocks:
                    num_blocks += 1
                    shard[key] = alone
                    pending[key] = 1
                else:
                    self.num_refused += 1
            elif owners.device & bit:
                confirmed[key] = confirmed.get(key, 0) + 1
            else:
                pending[key] = 1
                shared.append(key)
        self.num_blocks = num_blocks
        if shared:
            self._set(shared, rank, Tier.DEVICE)
        self.version += bool(fresh)
        return [*again, *fresh]

    def settle(self, rank: int, hashes: Hashes | Sequence[int]) -> None:
        """Takes back one arrival of each block; blocks neither confirmed nor still awaited go.

        Of two arrivals of a block with one confirmed, the first to settle is taken for that one;
        when both have settled nothing is left. After drop_rank it does nothing.
        """
        pending, confirmed = self._pending[rank], self._confirmed[rank]
        gone = []
        for key in _keys(hashes):
            count = confirmed.pop(key, 0)
            if count:
                if count > 1:
                    confirmed[key] = count - 1
                continue
            count = pending.pop(key, 0)
            if count > 1:
                pending[key] = count - 1
            elif count:
                gone.append(key)
        if gone:
            self._unset(gone, rank, Tier.DEVICE)

    # ---------------------------------------------------------------- ranks that come and go

    def drop_rank(self, rank: int) -> None:
        """The rank is gone: no credit from now on, arrivals and promise forgotten. O(1)."""
        self._retire(rank)
        self._bits.promise(rank, False)
        self._pending[rank] = {}
        self._confirmed[rank] = {}

    def clear_rank(self, rank: int) -> None:
        """The rank holds nothing any more; what is arriving still arrives. O(pending arrivals)."""
        self._retire(rank)
        pending = self._pending[rank]
        for key in self._set(list(pending), rank, Tier.DEVICE):
            del pending[key]

    def sweep(self, budget: int) -> bool:
        """Takes dead lives out of up to `budget` owner sets. True when none is left anywhere."""
        bits = self._bits
        while budget > 0 and (bits.sweeping or bits.dead):
            if not bits.sweeping:
                bits.begin_sweep()
                self._sweep_shard = 0
            if self._sweep_keys:
                batch = self._sweep_keys[-budget:]
                del self._sweep_keys[-budget:]
                self._strip(self._shards[self._sweep_shard - 1], batch)
                budget -= len(batch)
            elif self._sweep_shard < NUM_SHARDS:
                self._sweep_keys = list(self._shards[self._sweep_shard])
                self._sweep_shard += 1
                budget -= 1
            else:
                bits.end_sweep()
        return not (bits.sweeping or bits.dead)

    # ---------------------------------------------------------------- how far a prompt matches

    def match(self, keys: Sequence[int]) -> Match:
        """One pass for all ranks. keys: low64 of the prompt's block hashes, in order.

        Where the owners of a block hold prefix-closed, those who own both ends of a span own all of
        it, and whoever else owns its far end lacks the near one: so the pass gallops while owners
        are the same, then bisects; what it probed on the way waits in `ahead`. Elsewhere it walks.
        """
        bits, shards = self._bits, self._shards
        alive, closed = bits.alive, bits.closed
        device = held = alive
        device_runs: Runs = []
        held_runs: Runs = []
        ahead: list[tuple[int, OwnerSet | None]] = []
        at, step, num = 0, FIRST_JUMP, len(keys)
        owners = shards[keys[0] >> SHIFT].get(keys[0]) if num else None
        while owners is not None and owners.anywhere & alive:
            own_device, own_held = owners.device & alive, owners.held & alive
            if device & own_device != device:
                device_runs.append((device, at))
                device &= own_device
            if held & own_held != held:
                held_runs.append((held, at))
                held &= own_held
            jumps = own_held and not own_held & ~closed
            run = owners
            while owners is run:
                if ahead and (jumps or ahead[-1][0] == at + 1):
                    probe, found = ahead.pop()
                elif at + 1 == num:
                    at, owners = num, None
                    break
                else:
                    probe = at + 1
                    if jumps:
                        probe = min(at + step, num - 1)
                        step *= GALLOP
                    key = keys[probe]
                    found = shards[key >> SHIFT].get(key)
                while found is not run and (
                    found is None
                    or found.device & alive != own_device
                    or found.held & alive != own_held
                    or not found.anywhere & alive
                ):
                    if probe == at + 1:
                        at, owners = probe, found
                        break
                    ahead.append((probe, found))
                    probe = (at + probe) // 2
                    key = keys[probe]
                    found = shards[key >> SHIFT].get(key)
                else:
                    at = probe
        device_runs.append((device, at))
        held_runs.append((held, at))
        column = bits.column(self.capacity, device_runs)
        same = device_runs == held_runs
        return Match(column, column if same else bits.column(self.capacity, held_runs), at)

    # ---------------------------------------------------------------- owner sets of blocks

    def _set(self, keys: Sequence[int], rank: int, tier: Tier) -> list[int]:
        """Adds an owner; returns the keys that did not fit. Equal owners are worked out once."""
        alone = self._alone_on(rank, tier)
        shards = self._shards
        old: OwnerSet | None = None
        new = alone
        refused = []
        self.version += 1
        for key in keys:
            shard = shards[key >> SHIFT]
            owners = shard.get(key)
            if owners is None:
                if self.num_blocks >= self.max_blocks:
                    refused.append(key)
                    continue
                self.num_blocks += 1
                shard[key] = alone
                continue
            if owners is not old:
                old, new = owners, self._sets.with_bit(owners, tier, alone.anywhere)
            if new is not old:
                shard[key] = new
        self.num_refused += len(refused)
        return refused

    def _alone_on(self, rank: int, tier: Tier) -> OwnerSet:
        """What a block is mapped to that only this rank holds."""
        alone = self._alone[rank][tier]
        if alone is None:
            alone = self._sets.with_bit(None, tier, self._bits.of(rank))
            self._alone[rank][tier] = alone
        return alone

    def _unset(self, keys: Sequence[int], rank: int, tier: Tier) -> None:
        """Takes an owner away; a block without owners goes."""
        alone = self._alone[rank][tier]
        if alone is None:
            return  # nothing was added in this life
        self.version += 1
        shards = self._shards
        old: OwnerSet | None = None
        new = alone
        for key in keys:
            shard = shards[key >> SHIFT]
            owners = shard.get(key)
            if owners is alone:
                del shard[key]
                self.num_blocks -= 1
                continue
            if owners is None:
                continue
            if owners is not old:
                old, new = owners, self._sets.without_bit(owners, tier, alone.anywhere)
            if not new.anywhere:
                del shard[key]
                self.num_blocks -= 1
            elif new is not old:
                shard[key] = new

    def _retire(self, rank: int) -> None:
        self.version += 1
        self._bits.retire(rank)
        self._alone[rank] = [None] * len(Tier)

    def _strip(self, shard: dict[int, OwnerSet], keys: list[int]) -> None:
        dead = self._bits.sweeping
        stripped: dict[OwnerSet, OwnerSet] = {}
        for key in keys:
            owners = shard.get(key)
            if owners is None or not owners.anywhere & dead:
                continue
            new = stripped.get(owners)
            if new is None:
                new = stripped[owners] = self._sets.without(owners, dead)
            if new.anywhere:
                shard[key] = new
            else:
                del shard[key]
                self.num_blocks -= 1

    # ---------------------------------------------------------------- to look at it

    def holds(self, rank: int, key: int, tier: Tier) -> bool:
        """Whether this rank is credited with this block in exactly this tier (or its like)."""
        owners = self._shards[key >> SHIFT].get(key)
        if owners is None:
            return False
        planes = (owners.device, owners.host, owners.store)
        return bool(planes[PLANES[tier]] & self._bits.living(rank))

    def keys(self, rank: int, tier: Tier) -> list[int]:
        """What this rank is credited with in this tier, ascending. O(blocks)."""
        return sorted(key for shard in self._shards for key in shard if self.holds(rank, key, tier))

    def num_arriving(self) -> int:
        """Blocks with unsettled arrivals, over all ranks; 0 when no request is under way."""
        return sum(map(len, self._pending)) + sum(map(len, self._confirmed))

    def check(self) -> None:
        """Asserts what holds between calls. O(blocks)."""
        self._bits.check()
        assert self.num_blocks == sum(map(len, self._shards)) <= self.max_blocks
        known = self._bits.alive | self._bits.dead | self._bits.sweeping
        for index, shard in enumerate(self._shards):
            for key, owners in shard.items():
                assert key >> SHIFT == index
                assert owners.anywhere
                assert not owners.anywhere & ~known
                assert owners.held == owners.device | owners.host
                assert owners.anywhere == owners.held | owners.store
        for rank, pending in enumerate(self._pending):
            assert all(count > 0 for count in pending.values())
            assert all(count > 0 for count in self._confirmed[rank].values())
            assert all(self.holds(rank, key, Tier.DEVICE) for key in pending)


def _keys(hashes: Hashes | Sequence[int]) -> Sequence[int]:
    return low64(hashes) if isinstance(hashes, bytes) else hashes

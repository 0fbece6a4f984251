"""Interned sets of ranks: the values of the prefix map, shared by all blocks with the same owners.

A set of ranks is a Python int with one bit per rank: intersecting a thousand ranks is one `&`.
Equal sets are made once and shared. The tables that find them again are bounded in two generations:
what was not asked for during a whole generation is forgotten, which costs a second copy at most,
never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from rtp.core.types import Tier

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

PLANES = (0, 1, 2, 2)
"""Plane of an owner set for each Tier: what is neither on device nor on host is a hint."""


class OwnerSet(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Which ranks hold a block, as bit masks. Compared by identity; equal ones may exist twice.
    Equal masks of one set are one int, which a match then reads once."""

    device: int
    host: int
    store: int
    held: int
    """device | host."""
    anywhere: int
    """device | host | store."""


class TwoGenerations(Generic[K, V]):
    """A cache of at most 2 * `size` entries that forgets in bulk and never clears a large dict."""

    __slots__ = ("_old", "_size", "_young")

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        if len(self._young) >= self._size:
            self._old = self._young
            self._young = {}
        self._young[key] = value


class OwnerSets:
    """Makes owner sets, each once while it is in use."""

    __slots__ = ("_known",)

    def __init__(self, size: int = 8192) -> None:
        self._known: TwoGenerations[tuple[int, int, int], OwnerSet] = TwoGenerations(size)

    def __len__(self) -> int:
        return len(self._known)

    def of(self, device: int, host: int, store: int) -> OwnerSet:
        key = (device, host, store)
        found = self._known.get(key)
        if found is None:
            held = device | host if host else device
            found = OwnerSet(device, host, store, held, held | store if store else held)
            self._known.put(key, found)
        return found

    def with_bit(self, owners: OwnerSet | None, tier: Tier, bit: int) -> OwnerSet:
        """`owners` (None: nobody) and the rank of `bit`."""
        planes = [owners.device, owners.host, owners.store] if owners else [0, 0, 0]
        planes[PLANES[tier]] |= bit
        return self.of(*planes)

    def without_bit(self, owners: OwnerSet, tier: Tier, bit: int) -> OwnerSet:
        planes = [owners.device, owners.host, owners.store]
        planes[PLANES[tier]] &= ~bit
        return self.of(*planes)

    def without(self, owners: OwnerSet, dead: int) -> OwnerSet:
        """`owners` less every rank in the mask `dead`, on all planes."""
        keep = ~dead
        return self.of(owners.device & keep, owners.host & keep, owners.store & keep)

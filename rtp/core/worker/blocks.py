"""BlockManager: who uses which page of one tier, which hold a known prefix, what leaves next.

Each block is in exactly one state: **held** (users > 0), **cached** (no user, but its content has a
key and can be matched) or **free**. Cached blocks count as available: allocate() takes free ones
first, then the cached ones least recently used. A sequence gives its blocks back tail first, so
that a block leaves before the blocks it builds on, and the set of keys stays closed under prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockManager:
    """Pages of one tier of one rank. Ids are 0 .. num_blocks-1; keys are 128-bit block hashes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._users = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._changes: dict[bytes, bool] = {}

    @property
    def num_available(self) -> int:
        """Blocks that allocate() could hand out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    def num_available_beside(self, ids: Iterable[int]) -> int:
        """The same once these held or cached blocks have been acquired."""
        return self.num_available - sum(self._users[block] == 0 for block in ids)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def users(self) -> list[int]:
        """User count of every block."""
        return list(self._users)

    @property
    def num_changes(self) -> int:
        """Keys that take_changes() would return; never more than 2 * num_blocks."""
        return len(self._changes)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Ids of the longest held prefix of `keys`. Changes nothing. Cost O(matched)."""
        ids = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            ids.append(block)
        return ids

    def acquire(self, ids: Iterable[int]) -> None:
        """One more user for each of these held or cached blocks."""
        for block in ids:
            if self._users[block] == 0:
                del self._cached[block]
            self._users[block] += 1

    def allocate(self, n: int) -> list[int] | None:
        """n blocks of any content with one user each; without room None, and nothing changed."""
        if n > self.num_available:
            return None
        ids = []
        for _ in range(n):
            block = self._free.pop() if self._free else self._evict()
            self._users[block] = 1
            ids.append(block)
        return ids

    def register(self, block: int, key: bytes) -> int:
        """Makes a computed block findable. Returns the block that stands for `key`: where another
        one already does, the caller's use moves to that one and `block` is freed.
        """
        known = self._by_key.get(key)
        if known is not None and known != block:
            self.acquire((known,))
            self.release((block,))
            return known
        if known is None:
            self._by_key[key] = block
            self._key[block] = key
            self._record(key, added=True)
        return block

    def release(self, ids: Sequence[int]) -> None:
        """One user less for each; `ids` in prefix order, the tail leaves first."""
        for block in reversed(ids):
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._key[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def num_exclusive(self, ids: Iterable[int]) -> int:
        """How many of these have a single user: what releasing them once would make available."""
        return sum(self._users[block] == 1 for block in ids)

    def clear(self) -> None:
        """Forgets all content that nobody uses; held blocks keep their keys, so that keys of blocks
        registered later still have their prefix."""
        while self._cached:
            self._free.append(self._evict())

    def keys(self) -> list[bytes]:
        """Everything findable, held or cached."""
        return list(self._by_key)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(added, removed) since the last call; a key that came and went is in neither."""
        added = [key for key, new in self._changes.items() if new]
        removed = [key for key, new in self._changes.items() if not new]
        self._changes.clear()
        return added, removed

    def check(self) -> None:
        """Raises AssertionError unless free + held + cached == total, no id twice, counts sound."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, users in enumerate(self._users) if users > 0}
        assert min(self._users, default=0) >= 0, "negative user count"
        assert len(free) == len(self._free), "a free block is listed twice"
        assert len(free | cached | held) == self.num_blocks, "a block is lost"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block in two states"
        assert {key: block for block, key in enumerate(self._key) if key} == self._by_key
        assert all(self._key[block] is not None for block in cached), "cached without a key"
        assert all(self._key[block] is None for block in free), "free with a key"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._key[block]
        assert key is not None
        del self._by_key[key]
        self._key[block] = None
        self._record(key, added=False)
        return block

    def _record(self, key: bytes, *, added: bool) -> None:
        # A pending change of the same key is always the opposite one: together they are nothing.
        if self._changes.pop(key, None) is None:
            self._changes[key] = added

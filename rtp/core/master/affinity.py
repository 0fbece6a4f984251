"""Which rank a chat was served by last: a preference between equals, never a duty.

The table lies in shards: one dict whose entries come and go is rebuilt over and over, and with
100,000 chats in it each rebuild stops the Master for 8 ms.
"""

from __future__ import annotations

from collections import OrderedDict
from zlib import crc32

from rtp.core.types import WorkerId

SHARD_CHATS = 1024
Shard = OrderedDict[tuple[str, str], tuple[float, WorkerId, int]]


class Affinity:
    """(tenant, chat id) -> (worker id, rank), at most `capacity` chats, each for `age_s` after
    its last use. Worker ids outlive restarts, so a chat finds its machine again."""

    def __init__(self, capacity: int, age_s: float) -> None:
        num_shards = max(1, capacity // SHARD_CHATS)
        self._shard_capacity = capacity // num_shards
        self._age_s = age_s
        self._shards: list[Shard] = [OrderedDict() for _ in range(num_shards)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def find(self, tenant: str, chat_id: str, now: float) -> tuple[WorkerId, int] | None:
        if not chat_id:
            return None
        shard = self._shard(chat_id)
        found = shard.get((tenant, chat_id))
        if found is None:
            return None
        used, worker_id, rank = found
        if now - used > self._age_s:
            del shard[tenant, chat_id]
            return None
        return worker_id, rank

    def remember(
        self, tenant: str, chat_id: str, worker_id: WorkerId, rank: int, now: float
    ) -> None:
        if not chat_id:
            return
        shard = self._shard(chat_id)
        self._forget_old(shard, now)
        shard.pop((tenant, chat_id), None)
        shard[tenant, chat_id] = (now, worker_id, rank)
        if len(shard) > self._shard_capacity:
            shard.popitem(last=False)

    def _shard(self, chat_id: str) -> Shard:
        return self._shards[crc32(chat_id.encode()) % len(self._shards)]

    def _forget_old(self, shard: Shard, now: float) -> None:
        """Least recently used first, so that the oldest stand in front."""
        while shard:
            key, (used, _, _) = next(iter(shard.items()))
            if now - used <= self._age_s:
                return
            del shard[key]


class Chats:
    """Where a chat's prompts were computed last, and where its tokens; one place where requests are
    not split."""

    def __init__(self, capacity: int, age_s: float) -> None:
        self.prefill = Affinity(capacity, age_s)
        self.decode = Affinity(capacity, age_s)

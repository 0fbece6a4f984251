"""Which rank a chat was served by last: a preference between equals, never a duty.

The table lies in shards: one dict whose entries come and go is rebuilt over and over, and with
100,000 chats in it each rebuild stops the Master for 8 ms.
"""

from __future__ import annotations

from collections import OrderedDict
from zlib import crc32

import msgspec

from rtp.core.types import WorkerId

SHARD_CHATS = 1024
FORGET_EVERY = 8
"""Chats that are remembered between two looks for old ones; each touches what nobody used lately.
"""


Where = tuple[WorkerId, int]


class _Last(msgspec.Struct, gc=False):
    """Where a chat was served last. No tuple: a collector would look at each of 100,000."""

    at: float
    worker_id: WorkerId
    rank: int
    decode_worker_id: WorkerId | None = None
    decode_rank: int = -1


Shard = OrderedDict[str, _Last]


class Affinity:
    """(tenant, chat id) -> (worker id, rank), and the decode rank beside it; at most `capacity`
    chats, each for `age_s` after its last use. Worker ids outlive restarts, so a chat finds its
    machine again."""

    def __init__(self, capacity: int, age_s: float) -> None:
        num_shards = max(1, capacity // SHARD_CHATS)
        self._shard_capacity = capacity // num_shards
        self._age_s = age_s
        self._num_remembered = 0
        self._shards: list[Shard] = [OrderedDict() for _ in range(num_shards)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def find(self, tenant: str, chat_id: str, now: float) -> Where | None:
        """Where its prompts were computed last."""
        last = self._last(tenant, chat_id, now)
        return None if last is None else (last.worker_id, last.rank)

    def find_decode(self, tenant: str, chat_id: str, now: float) -> Where | None:
        """Where its tokens were generated last, if its model splits requests."""
        last = self._last(tenant, chat_id, now)
        if last is None or last.decode_worker_id is None:
            return None
        return last.decode_worker_id, last.decode_rank

    def remember(
        self,
        tenant: str,
        chat_id: str,
        worker_id: WorkerId,
        rank: int,
        now: float,
        decode: Where | None = None,
    ) -> None:
        if not chat_id:
            return
        key, shard = self._place(tenant, chat_id)
        self._num_remembered += 1
        if self._num_remembered % FORGET_EVERY == 0:
            self._forget_old(shard, now)
        last = shard.get(key)
        if last is None:
            last = shard[key] = _Last(now, worker_id, rank)
            if len(shard) > self._shard_capacity:
                shard.popitem(last=False)
        else:
            last.at, last.worker_id, last.rank = now, worker_id, rank
            shard.move_to_end(key)
        if decode is not None:
            last.decode_worker_id, last.decode_rank = decode

    def _last(self, tenant: str, chat_id: str, now: float) -> _Last | None:
        if not chat_id:
            return None
        key, shard = self._place(tenant, chat_id)
        last = shard.get(key)
        if last is not None and now - last.at > self._age_s:
            del shard[key]
            return None
        return last

    def _place(self, tenant: str, chat_id: str) -> tuple[str, Shard]:
        """Its key (a length tells where the tenant ends), and the shard."""
        key = f"{len(tenant)} {tenant}{chat_id}"
        return key, self._shards[crc32(chat_id.encode()) % len(self._shards)]

    def _forget_old(self, shard: Shard, now: float) -> None:
        """Least recently used first, so that the oldest stand in front."""
        while shard:
            oldest = next(iter(shard))
            if now - shard[oldest].at <= self._age_s:
                return
            del shard[oldest]

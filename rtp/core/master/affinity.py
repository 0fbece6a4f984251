"""Which rank a chat was served by last: a preference between equals, never a duty."""

from __future__ import annotations

from collections import OrderedDict

from rtp.core.types import WorkerId


class Affinity:
    """(tenant, chat id) -> (worker id, rank), at most `capacity` chats, each for `age_s` after its
    last use. Worker ids outlive restarts, so a chat finds its machine again."""

    def __init__(self, capacity: int, age_s: float) -> None:
        self._capacity = capacity
        self._age_s = age_s
        self._places: OrderedDict[tuple[str, str], tuple[float, WorkerId, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, tenant: str, chat_id: str, now: float) -> tuple[WorkerId, int] | None:
        self._forget_old(now)
        found = self._places.get((tenant, chat_id)) if chat_id else None
        return found[1:] if found else None

    def remember(
        self, tenant: str, chat_id: str, worker_id: WorkerId, rank: int, now: float
    ) -> None:
        if not chat_id:
            return
        self._places.pop((tenant, chat_id), None)
        self._places[tenant, chat_id] = (now, worker_id, rank)
        if len(self._places) > self._capacity:
            self._places.popitem(last=False)

    def _forget_old(self, now: float) -> None:
        """Least recently used first, so that the oldest stand in front."""
        while self._places:
            key, (used, _, _) = next(iter(self._places.items()))
            if now - used <= self._age_s:
                return
            del self._places[key]

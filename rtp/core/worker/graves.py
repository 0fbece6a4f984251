"""Attempts that must not run (again) on this worker: tombstones, bounded by age and count."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from rtp.core.types import RequestId

GRAVE_S = 600.0
MAX_GRAVES = 65536


@dataclass(slots=True)
class _Grave:
    attempt: int
    reason: str
    until: float
    told: set[int] = field(default_factory=set)


class Graves:
    """Per request the highest dead attempt; all lower ones are dead with it."""

    def __init__(self, max_graves: int = MAX_GRAVES) -> None:
        self._max = max_graves
        self._graves: OrderedDict[RequestId, _Grave] = OrderedDict()  # by age

    def __len__(self) -> int:
        return len(self._graves)

    def bury(self, request_id: RequestId, attempt: int, reason: str, now: float) -> None:
        """reason: what a later Submit of it is told, "tombstone" or "unknown"."""
        grave = self._graves.get(request_id)
        if grave is None:
            self._graves[request_id] = _Grave(attempt, reason, now + GRAVE_S)
            if len(self._graves) > self._max:
                self._graves.popitem(last=False)
            return
        grave.until = now + GRAVE_S
        self._graves.move_to_end(request_id)
        if attempt > grave.attempt:
            grave.attempt, grave.reason = attempt, reason

    def reason(self, request_id: RequestId, attempt: int) -> str | None:
        """Why this attempt is refused; None if it is not."""
        grave = self._graves.get(request_id)
        return grave.reason if grave is not None and attempt <= grave.attempt else None

    def tell(self, request_id: RequestId, attempt: int) -> bool:
        """Whether the end of this buried attempt is still to be reported; from now on it is not."""
        told = self._graves[request_id].told
        if attempt in told:
            return False
        told.add(attempt)
        return True

    def expire(self, now: float) -> None:
        while self._graves:
            request_id, grave = next(iter(self._graves.items()))
            if grave.until > now:
                return
            del self._graves[request_id]

"""When something is to be done about a booking, to a tenth of a second: set, moved and dropped in
constant time.

A heap would keep each booking, with its hashes, until its lease were over, however early it ended.
"""

from __future__ import annotations

import heapq
from math import ceil, inf

from rtp.core.master.booking import Booking
from rtp.core.types import RequestId

TICK_S = 0.1

Bucket = dict[RequestId, Booking]


class DueTimes:
    """At most one time a booking."""

    def __init__(self) -> None:
        self._bucket_of: dict[RequestId, Bucket] = {}
        self._buckets: dict[int, Bucket] = {}
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._bucket_of)

    def set(self, booking: Booking, at: float) -> None:
        """In place of an earlier time, if it had one."""
        self.drop(booking)
        number = ceil(at / TICK_S)
        number += number * TICK_S < at  # else what is not over yet would be due at once for ever
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            heapq.heappush(self._order, number)
        request_id = booking.grant.request_id
        bucket[request_id] = booking
        self._bucket_of[request_id] = bucket

    def drop(self, booking: Booking) -> None:
        bucket = self._bucket_of.pop(booking.grant.request_id, None)
        if bucket is not None:
            del bucket[booking.grant.request_id]

    def take(self, now: float) -> list[Booking]:
        """Those whose time has come, which then have none; earliest first."""
        due: list[Booking] = []
        while self._order and self._order[0] * TICK_S <= now:
            due += self._buckets.pop(heapq.heappop(self._order)).values()
        for booking in due:
            del self._bucket_of[booking.grant.request_id]
        return due

    @property
    def next_due(self) -> float:
        return self._order[0] * TICK_S if self._order else inf

"""One timer per request: when it must be looked at although nothing happens."""

from __future__ import annotations

from sortedcontainers import SortedList

from rtp.core.types import RequestId


class Timers:
    """Ordered by time, then id. Cost: O(log n) to set or remove."""

    __slots__ = ("_order", "_when")

    def __init__(self) -> None:
        self._order: SortedList[tuple[float, RequestId]] = SortedList()
        self._when: dict[RequestId, float] = {}

    def __len__(self) -> int:
        return len(self._when)

    def set(self, request_id: RequestId, when: float) -> None:
        if self._when.get(request_id) == when:
            return
        self.remove(request_id)
        self._when[request_id] = when
        self._order.add((when, request_id))

    def remove(self, request_id: RequestId) -> None:
        when = self._when.pop(request_id, None)
        if when is not None:
            self._order.remove((when, request_id))

    def get(self, request_id: RequestId) -> float | None:
        return self._when.get(request_id)

    def next(self) -> float | None:
        return self._order[0][0] if self._order else None

    def due(self, now: float) -> list[RequestId]:
        """Those whose time has come, earliest first; they stay until set anew or removed."""
        return [request_id for _, request_id in self._order.irange(maximum=(now, "\U0010ffff"))]

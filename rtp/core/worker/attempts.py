"""The attempts a worker holds: by request, by frontend, by when they must be looked at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sortedcontainers import SortedList

from rtp.core.types import FrontendId, RequestId
from rtp.core.worker.sequence import Sequence
from rtp.core.worker.streams import Attempt

FRONTEND_GONE_S = 10.0
SLOW_READER_S = 30.0
HANDOVER_S = 10.0
"""How long the pages of what was handed over are kept for a worker that does not come."""


class _Frontend:
    __slots__ = ("attempts", "down_at")

    def __init__(self) -> None:
        self.down_at: float | None = None
        self.attempts: dict[RequestId, Attempt] = {}


class Attempts:
    """At most one attempt per request. A frontend is known while its connection is up, and for 10 s
    after it closed."""

    def __init__(self) -> None:
        self._by_request: dict[RequestId, Attempt] = {}
        self._timers: SortedList[tuple[float, RequestId]] = SortedList()
        self._frontends: dict[FrontendId, _Frontend] = {}
        self._parked: dict[RequestId, None] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Attempt]:
        """Over the attempts of this moment; removing them meanwhile is fine."""
        return iter(list(self._by_request.values()))

    def get(self, request_id: RequestId) -> Attempt | None:
        return self._by_request.get(request_id)

    def of(self, seq: Sequence) -> Attempt:
        """Of a sequence that lives: its attempt is there."""
        attempt = self._by_request.get(seq.request_id)
        assert attempt is not None
        return attempt

    def add(self, attempt: Attempt) -> None:
        self._by_request[attempt.request_id] = attempt
        self._frontend(attempt.frontend_id).attempts[attempt.request_id] = attempt
        self._timers.add((attempt.timer, attempt.request_id))

    def remove(self, attempt: Attempt) -> None:
        del self._by_request[attempt.request_id]
        del self._frontends[attempt.frontend_id].attempts[attempt.request_id]
        self._timers.remove((attempt.timer, attempt.request_id))
        self._parked.pop(attempt.request_id, None)

    def set_timer(self, attempt: Attempt) -> None:
        """After a choice was parked or goes on, or all were handed over."""
        self._timers.remove((attempt.timer, attempt.request_id))
        parked = [s.parked_at for s in attempt.streams.values() if s.parked_at is not None]
        attempt.timer = min([attempt.deadline, *(at + SLOW_READER_S for at in parked)])
        if attempt.handed_at is not None:
            attempt.timer = min(attempt.timer, attempt.handed_at + HANDOVER_S)
        self._timers.add((attempt.timer, attempt.request_id))
        if len(parked) == sum(not stream.finish for stream in attempt.streams.values()) > 0:
            self._parked[attempt.request_id] = None
        else:
            self._parked.pop(attempt.request_id, None)

    def parked(self, most: int) -> tuple[RequestId, ...]:
        """Requests all of whose unfinished choices are parked."""
        return tuple(islice(self._parked, most))

    def due(self, now: float) -> Attempt | None:
        """The first one whose timer has run out."""
        if self._timers and self._timers[0][0] <= now:
            return self._by_request[self._timers[0][1]]
        return None

    def next_deadline(self) -> float | None:
        times: list[float] = [self._timers[0][0]] if self._timers else []
        times += [
            frontend.down_at + FRONTEND_GONE_S
            for frontend in self._frontends.values()
            if frontend.down_at is not None
        ]
        return min(times, default=None)

    # ------------------------------------------------------------ frontends

    @property
    def num_frontends(self) -> int:
        return len(self._frontends)

    def connected(self, frontend_id: FrontendId) -> list[Attempt]:
        """Its connection is up; returns what it has here."""
        frontend = self._frontend(frontend_id)
        frontend.down_at = None
        return list(frontend.attempts.values())

    def disconnected(self, frontend_id: FrontendId, now: float) -> None:
        self._frontend(frontend_id).down_at = now

    def is_up(self, frontend_id: FrontendId) -> bool:
        frontend = self._frontends.get(frontend_id)
        return frontend is not None and frontend.down_at is None

    def orphans(self, now: float) -> list[Attempt]:
        """Attempts whose frontend has been gone too long."""
        return [
            attempt
            for frontend in self._frontends.values()
            if _gone(frontend, now)
            for attempt in frontend.attempts.values()
        ]

    def forget_frontends(self, now: float) -> None:
        """Those gone too long, whose attempts must have been removed."""
        for frontend_id, frontend in list(self._frontends.items()):
            if _gone(frontend, now):
                assert not frontend.attempts
                del self._frontends[frontend_id]

    def check(self) -> None:
        """Raises AssertionError unless the three views agree."""
        by_frontend = {
            request_id: attempt
            for frontend in self._frontends.values()
            for request_id, attempt in frontend.attempts.items()
        }
        assert by_frontend == self._by_request
        timers = sorted((attempt.timer, attempt.request_id) for attempt in self)
        assert list(self._timers) == timers

    def _frontend(self, frontend_id: FrontendId) -> _Frontend:
        return self._frontends.setdefault(frontend_id, _Frontend())


def _gone(frontend: _Frontend, now: float) -> bool:
    return frontend.down_at is not None and frontend.down_at + FRONTEND_GONE_S <= now

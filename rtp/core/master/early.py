"""Asks of a Master's first seconds for models whose workers have not come back to it yet.

Frontends find a new Master before its workers do. Who refused then would end requests that a second
later somebody could serve; so they wait here, and are asked anew once their model has a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import msgspec

from rtp.core.messages import Ask
from rtp.core.types import FrontendId, RequestId

MOST_A_TICK = 64
"""Asked anew in one Tick, so that a whole backlog makes no long turn."""


@dataclass(frozen=True, slots=True)
class EarlyAsk:
    """One that waits; `again` and `arrival` are kept for when it is asked anew."""

    ask: Ask
    arrival: float
    asked_at: float
    again: bool

    @property
    def deadline(self) -> float:
        ask = self.ask
        return self.asked_at + min(ask.deadline_s, ask.ttft_timeout_s or ask.deadline_s)

    def later(self, now: float) -> Ask:
        """The Ask as its frontend would send it now."""
        gone_s, ttft_s = now - self.asked_at, self.ask.ttft_timeout_s
        return msgspec.structs.replace(
            self.ask,
            deadline_s=self.ask.deadline_s - gone_s,
            ttft_timeout_s=None if ttft_s is None else ttft_s - gone_s,
        )


class Early:
    """By request id, in the order of arrival; at most `max_requests`."""

    def __init__(self, grace_s: float, max_requests: int) -> None:
        """grace_s: how long after its start a Master counts as new; 0: never."""
        self._next_due = inf
        self._grace_s = grace_s
        self._max = max_requests
        self._until = -inf
        self._asks: dict[RequestId, EarlyAsk] = {}

    def __len__(self) -> int:
        return len(self._asks)

    @property
    def next_due(self) -> float:
        """When to call due() if nothing else happens; a past time means at once."""
        return self._next_due if self._asks else inf

    def get(self, request_id: RequestId) -> EarlyAsk | None:
        return self._asks.get(request_id)

    def start(self, now: float) -> None:
        """The Master is new now."""
        self._until = now + self._grace_s

    def takes(self, ask: Ask, arrival: float, now: float, *, again: bool) -> bool:
        """Keeps an Ask whose model has no worker, if the Master is new enough for one to come."""
        if now >= self._until or len(self._asks) >= self._max:
            return False
        early = EarlyAsk(ask, arrival, now, again)
        self._next_due = min(self.next_due, self._until, early.deadline)
        self._asks[ask.request_id] = early
        return True

    def remove(self, request_id: RequestId) -> None:
        self._asks.pop(request_id, None)

    def frontend_down(self, frontend_id: FrontendId) -> None:
        for request_id, early in list(self._asks.items()):
            if early.ask.frontend_id == frontend_id:
                del self._asks[request_id]

    def due(self, alive: Callable[[str], bool], now: float) -> list[EarlyAsk]:
        """Takes out, at most MOST_A_TICK, what waits no longer: its model has a worker, its
        deadline has passed, or the Master is new no more. Cost: O(what waits)."""
        over = now >= self._until
        models = {early.ask.model for early in self._asks.values()}
        served = {model for model in models if over or alive(model)}
        found = [e for e in self._asks.values() if e.ask.model in served or now >= e.deadline]
        for early in found[:MOST_A_TICK]:
            del self._asks[early.ask.request_id]
        deadlines = [self._until, *(early.deadline for early in self._asks.values())]
        self._next_due = -inf if len(found) > MOST_A_TICK else min(deadlines)
        return found[:MOST_A_TICK]

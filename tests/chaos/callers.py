"""Who asks the Master for places only, and runs the requests elsewhere (router-only mode)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rtp.core.commands import Command, Send
from rtp.core.events import Event, From, MasterUp, Tick
from rtp.core.messages import Ask, Cancel, Done, Grant, Refuse, Renew
from rtp.core.types import FrontendId, RequestId
from tests.chaos.scenario import Call
from tests.support.cluster import MODEL

MASTER = "master"
PATIENCE_S = 5.0


class Caller:
    """A core like a frontend's: tells what scenario.Call says of each call."""

    def __init__(self, frontend_id: FrontendId, calls: Sequence[Call]) -> None:
        self._frontend_id = frontend_id
        self._calls = {RequestId(f"c{number}"): call for number, call in enumerate(calls)}
        self._asked: dict[RequestId, None] = {}
        """Without an answer."""
        self._timers: list[tuple[float, RequestId, int]] = []
        """When to speak of a call again, and how often it was renewed; -1: to ask first."""
        self._began = False

    def handle(self, event: Event, now: float) -> list[Command]:
        if not self._began:
            self._began = True
            self._timers = [(now + call.at, key, -1) for key, call in self._calls.items()]
            heapq.heapify(self._timers)
        match event:
            case MasterUp():
                return [self._ask(key) for key in self._asked]
            case From(_, Grant(request_id=key)) if key in self._asked:
                del self._asked[key]
                heapq.heappush(self._timers, (now + self._calls[key].lease_s / 2, key, 0))
            case From(_, Refuse(request_id=key)):
                self._asked.pop(key, None)
            case Tick():
                return self._due(now)
        return []

    def next_deadline(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def _due(self, now: float) -> list[Command]:
        out: list[Command] = []
        while self._timers and self._timers[0][0] <= now:
            _, key, renewed = heapq.heappop(self._timers)
            call = self._calls[key]
            if renewed < 0:
                self._asked[key] = None
                out.append(self._ask(key))
            elif renewed < call.renewals:
                renew = Renew(key, 1, call.lease_s, prefilled=bool(renewed))
                out.append(Send(MASTER, renew))
                heapq.heappush(self._timers, (now + call.lease_s / 2, key, renewed + 1))
            elif call.end == "cancel":
                out.append(Send(MASTER, Cancel(key, 1, "called off")))
            elif call.end:
                out.append(Send(MASTER, Done(key, 1, call.end, call.num_tokens, 0, 1)))
        return out

    def _ask(self, key: RequestId) -> Command:
        call = self._calls[key]
        ask = Ask(
            frontend_id=self._frontend_id,
            request_id=key,
            attempt=1,
            model=MODEL,
            tenant="t",
            chat_id="",
            priority=0,
            hashes=call.hashes,
            num_tokens=call.num_tokens,
            max_tokens=8,
            n=1,
            deadline_s=PATIENCE_S,
            lease_s=call.lease_s,
        )
        return Send(MASTER, ask)

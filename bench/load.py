"""Open-loop load on a Master: Asks at the trace's times, Grants handed to the simulated ranks."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from bench.background import Background
from bench.conversation import Arrival
from bench.lean_fleet import MODEL, LeanFleet
from bench.lean_link import Job
from rtp.core.messages import Ask, AskMessage, Grant, Refuse
from rtp.core.types import FloatArray, FrontendId, RequestId
from rtp.io.master_client import MasterClient

FRONTEND = FrontendId("bench")
DEADLINE_S = 600.0
clock = time.monotonic


@dataclass(slots=True)
class Window:
    """What was seen of the requests that were due between two instants."""

    since: float
    until: float
    asked: int = 0
    granted: int = 0
    """Grants that arrived between these instants, whoever they were for."""
    ended: int = 0
    refused: list[str] = field(default_factory=list)
    late: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from the intended arrival to the Ask's sending."""
    at_once: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from the intended arrival to the Grant's arrival, of requests not held on purpose."""
    held: array[float] = field(default_factory=lambda: array("d"))
    """The same of those that were."""

    def holds(self, at: float) -> bool:
        return self.since <= at < self.until


class Load:
    """One frontend's connection, the generator, and the ranks' news. turn() every tick.

    Latency counts from the intended arrival, so a generator that is late makes it longer, not
    shorter; and a slow Master slows nothing down here.
    """

    def __init__(
        self, fleet: LeanFleet, background: Background, address: str, secret: bytes
    ) -> None:
        self.fleet = fleet
        self._background = background
        self.num_asked = self.num_granted = self.num_ended = 0
        self.refused: list[str] = []
        self.lost: list[str] = []
        self._up = asyncio.Event()
        self._client = MasterClient(
            address,
            secret=secret,
            frontend_id=FRONTEND,
            on_up=lambda term: self._up.set(),
            on_down=lambda: self.lost.append("the connection to the Master"),
            on_message=self._on_message,
        )
        self._open: dict[RequestId, tuple[float, Arrival]] = {}
        self._arrivals: Iterator[Arrival] = iter(())
        self._next: Arrival | None = None
        self._began = 0.0
        self._window = Window(0.0, 0.0)

    async def connect(self) -> None:
        self._client.start()
        await asyncio.wait_for(self._up.wait(), 10)

    async def close(self) -> None:
        await self._client.close()

    def begin(self, arrivals: Iterator[Arrival], since_s: float, until_s: float) -> Window:
        """Asks from now on; what is due from since_s to until_s after now is recorded."""
        self._arrivals, self._next = arrivals, next(arrivals)
        self._began = clock()
        self._window = Window(self._began + since_s, self._began + until_s)
        return self._window

    def stop(self) -> None:
        """Asks no more; what was asked goes on."""
        self._next = None

    @property
    def num_open(self) -> int:
        """Asked, and not ended on a rank."""
        return self.num_asked - self.num_ended - len(self.refused)

    def turn(self, now: float) -> None:
        """Ranks first, then everything due: its frames leave in one write behind this turn."""
        self._background.turn(now)
        self.fleet.tick(now)
        arrival = self._next
        while arrival is not None and self._began + arrival.at <= now:
            self._ask(arrival)
            arrival = self._next = next(self._arrivals)

    def ended(self, job: Job) -> None:
        """The fleet's on_end."""
        self.num_ended += 1
        if self._window.holds(self._began + job.arrival.at):
            self._window.ended += 1

    def _ask(self, arrival: Arrival) -> None:
        turn = arrival.turn
        request_id = RequestId(str(arrival.number))
        ask = Ask(
            frontend_id=FRONTEND,
            request_id=request_id,
            attempt=1,
            model=MODEL,
            tenant="",
            chat_id=arrival.chat,
            priority=0,
            hashes=b"".join(arrival.parts),
            num_tokens=turn.num_tokens,
            max_tokens=turn.output_tokens,
            n=1,
            deadline_s=DEADLINE_S,
        )
        due = self._began + arrival.at
        self._open[request_id] = (due, arrival)
        self._client.send(ask)
        self.num_asked += 1
        if self._window.holds(due):
            self._window.asked += 1
            self._window.late.append(clock() - due)

    def _on_message(self, message: AskMessage) -> None:
        now = clock()
        if isinstance(message, Grant):
            due, arrival = self._open.pop(message.request_id)
            self.num_granted += 1
            if self._window.holds(now):
                self._window.granted += 1
            if self._window.holds(due):
                (self._window.held if message.held else self._window.at_once).append(now - due)
            self.fleet.submit(message, arrival, now)
        elif isinstance(message, Refuse):
            due, _ = self._open.pop(message.request_id)
            reason = f"{message.status} {message.code}: {message.reason}"
            self.refused.append(reason)
            if self._window.holds(due):
                self._window.refused.append(reason)
        else:
            self.lost.append(str(message))


def percentiles(seconds: array[float]) -> FloatArray:
    """P50, P95, P99, P99.9 and the longest, in milliseconds; nan of nothing."""
    if not len(seconds):
        return np.full(5, np.nan)
    return np.quantile(np.frombuffer(seconds), [0.5, 0.95, 0.99, 0.999, 1.0]) * 1e3

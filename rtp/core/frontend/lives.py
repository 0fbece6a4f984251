"""The requests that live, and every step of a life: ask, deliver, lose a place, end.

Whatever way a request ends goes through one forget(), which frees all that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rtp.core.commands import Ended, Failed
from rtp.core.frontend import failures
from rtp.core.frontend.lifecycle import Request
from rtp.core.frontend.outbox import MASTER, Outbox
from rtp.core.frontend.streams import Streams
from rtp.core.frontend.timers import Timers
from rtp.core.messages import Cancel
from rtp.core.phases import TERMINAL, Phase, move
from rtp.core.types import FrontendId, RequestId


@dataclass(slots=True)
class Counters:
    """Since the start; each only grows."""

    begun: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    handovers: int = 0
    """Requests that went on at the decode worker reserved for them."""
    replacements: int = 0
    resumes: int = 0
    """Replacements after the first token."""
    reconnects: int = 0
    duplicates: int = 0
    gaps: int = 0
    strays: int = 0
    """Runs of requests and attempts that are over."""


class Lives:
    """All requests of a frontend between Begin and their end."""

    __slots__ = (
        "_behind",
        "_dirty",
        "_frontend_id",
        "_max_replacements",
        "_outbox",
        "_requests",
        "_streams",
        "_timers",
        "counters",
    )

    def __init__(
        self, frontend_id: FrontendId, outbox: Outbox, streams: Streams, max_replacements: int
    ) -> None:
        self.counters = Counters()
        self._frontend_id = frontend_id
        self._outbox = outbox
        self._streams = streams
        self._max_replacements = max_replacements
        self._requests: dict[RequestId, Request] = {}
        self._dirty: dict[RequestId, Request] = {}  # may have something to deliver
        self._behind: dict[RequestId, Request] = {}  # missed something their worker has sent
        self._timers = Timers()

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: RequestId) -> Request | None:
        return self._requests.get(request_id)

    @property
    def unsent(self) -> bool:
        """Something waits for the turn's end."""
        return bool(self._dirty or self._behind)

    def next_timer(self) -> float | None:
        return self._timers.next()

    def due(self, now: float) -> list[Request]:
        """Those whose timer has come."""
        return [self._requests[request_id] for request_id in self._timers.due(now)]

    def check(self) -> None:
        """Raises AssertionError where the tables disagree. Cost: O(requests)."""
        placed = {}
        for stream in self._streams:
            for request_id, request in stream.requests.items():
                assert request.grant is not None
                assert request.grant.worker_id == stream.worker_id
                assert request.grant.epoch == stream.epoch
                placed[request_id] = request
        assert len(self._timers) == len(self._requests)
        for some in (placed, self._dirty, self._behind):
            assert some.keys() <= self._requests.keys()
        for request_id, request in self._requests.items():
            assert request.phase not in TERMINAL
            assert self._timers.get(request_id) == request.next_timer()
            assert (request.grant is None) == (request.phase is Phase.QUEUED)
            assert (request.grant is None) == (request_id not in placed)

    # ------------------------------------------------------------ steps

    def begin(self, request: Request, now: float) -> None:
        self._requests[request.begin.request_id] = request
        self.counters.begun += 1
        self.ask(request, now)

    def ask(self, request: Request, now: float) -> None:
        """Asks the Master for a place; the same attempt may ask again."""
        request.ask_at = None
        self.set_timer(request)
        self._outbox.send(MASTER, request.ask(self._frontend_id, now))

    def ask_if_due(self, request: Request, now: float) -> None:
        """Asks, unless the pause before its next attempt lasts."""
        if request.ask_at is not None and now < request.ask_at:
            self.set_timer(request)
        else:
            self.ask(request, now)

    def set_timer(self, request: Request) -> None:
        """To be called whenever request.next_timer() may have changed."""
        self._timers.set(request.begin.request_id, request.next_timer())

    def gained(self, request: Request) -> None:
        """The turn's end shows the client what is new."""
        self._dirty[request.begin.request_id] = request

    def hand_over(self, request: Request, now: float) -> None:
        """Every choice has its first token: the decode worker goes on, unless it was lost since."""
        assert request.grant is not None
        to = request.grant.decode
        stream = self._streams.get(to.worker_id) if to is not None else None
        if to is None or stream is None or stream.epoch != to.epoch:
            self.displace(request, now, "decode_lost", cancel=True)
            return
        self._streams.remove(request)
        request.hand_over()
        stream.requests[request.begin.request_id] = request
        if not stream.up:
            request.connect_by = now + request.grant.lease_s
        self.set_timer(request)
        self.counters.handovers += 1
        self._outbox.send(to.worker_id, request.submit(now))

    def release_giver(self, request: Request) -> None:
        """The decode worker has what it needs, or is not needed any more."""
        giver = request.take_giver()
        if giver is not None:
            self._outbox.cancel(giver, request.begin.request_id, request.attempt, "handed_over")

    def resync(self, request: Request) -> None:
        """The turn's end asks the worker for everything from the next token wanted on."""
        self._behind[request.begin.request_id] = request
        self._outbox.owe_all(request)

    def displace(
        self,
        request: Request,
        now: float,
        reason: str,
        *,
        blame: bool = False,
        cancel: bool = False,
    ) -> None:
        """The current attempt is lost: another place is asked for, now or after a pause, or the
        request ends.

        blame: not on the same worker again.  cancel: the worker may live, it is told.
        """
        assert request.grant is not None
        request_id, attempt = request.begin.request_id, request.attempt
        worker_id = request.grant.worker_id
        self._outbox.note(
            "request.displaced",
            request_id=request_id,
            worker_id=worker_id,
            attempt=attempt,
            reason=reason,
        )
        if cancel:
            self._outbox.cancel(worker_id, request_id, attempt, reason)
        request.conclude()
        if request.finished:
            self._deliver(request)
            self._end(request, cancel=reason)
            return
        self._streams.remove(request)
        self.release_giver(request)
        request.displace(worker_id if blame else None, now)
        self.counters.replacements += 1
        self.counters.resumes += request.first_token
        if request.first_token:
            self.gained(request)  # a choice may have been concluded
        if request.replacements > self._max_replacements:
            self.fail(request, failures.no_worker(request_id))
        else:
            self.ask_if_due(request, now)

    def flush(self, now: float) -> None:
        """The end of a turn: deliveries, ends, and requests for what was missed."""
        dirty, self._dirty = self._dirty, {}
        for request in dirty.values():
            self._deliver(request)
            if request.finished:
                # Its worker may have told the Master that another one goes on.
                handed = any(choice.handed for choice in request.choices)
                self._end(request, cancel="finished" if handed else "")
        behind, self._behind = self._behind, {}
        for request in behind.values():  # a Submit that is known makes the worker send again
            if request.grant is not None:
                self._outbox.send(request.grant.worker_id, request.submit(now))

    # ------------------------------------------------------------ ends

    def fail(self, request: Request, failure: Failed, *, cancel: str = "failed") -> None:
        """Ends a request with an error, after what it has produced so far."""
        self.counters.failed += 1
        self._deliver(request)
        rejected = request.phase is Phase.QUEUED and request.attempt == 1
        self._forget(request, Phase.REJECTED if rejected else Phase.FAILED, cancel=cancel)
        self._outbox.add(failure)

    def leave(self, request: Request) -> None:
        """The client is gone: nothing more is said to it."""
        self.counters.cancelled += 1
        self._forget(request, Phase.CANCELLED, cancel="client_gone")

    def _deliver(self, request: Request) -> None:
        deliver = request.deliver()
        if deliver is not None:
            self._outbox.add(deliver)

    def _end(self, request: Request, *, cancel: str = "") -> None:
        """Every choice is delivered; the Master learns it from the worker."""
        begin = request.begin
        if request.grant is not None:
            self._outbox.over(request.grant.worker_id, begin.request_id, request.attempt)
        self.counters.ended += 1
        self._forget(request, Phase.DONE, cancel=cancel)
        self._outbox.add(
            Ended(begin.request_id, request.prompt_tokens, request.cached_tokens, request.generated)
        )

    def _forget(self, request: Request, phase: Phase, *, cancel: str) -> None:
        """Removes every trace; `cancel`, if any, is the reason told to worker and Master."""
        request_id = request.begin.request_id
        if cancel:
            if request.grant is not None:
                self._outbox.cancel(request.grant.worker_id, request_id, request.attempt, cancel)
            generated = request.generated
            self._outbox.send(MASTER, Cancel(request_id, request.attempt, cancel, generated))
        self._streams.remove(request)
        self.release_giver(request)
        request.phase = move(request.phase, phase)
        request.grant = None
        del self._requests[request_id]
        self._dirty.pop(request_id, None)
        self._behind.pop(request_id, None)
        self._timers.remove(request_id)

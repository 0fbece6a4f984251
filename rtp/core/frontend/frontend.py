"""The frontend's decisions: requests of clients, grants of the Master, streams of the workers.

Input of a turn changes state; what can be gathered (acknowledgements, text for clients) leaves
with the Tick that ends the turn. A request is placed anew only when its attempt can give nothing
more: the stream of a worker that may live is opened again first, and goes on with the next token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rtp.core.commands import Command, Ended, Failed
from rtp.core.events import (
    Begin,
    ClientGone,
    ClientPaused,
    ClientReady,
    Event,
    From,
    MasterDown,
    MasterUp,
    StreamDown,
    StreamUp,
    Tick,
)
from rtp.core.frontend import failures
from rtp.core.frontend.lifecycle import Request, Taken
from rtp.core.frontend.outbox import MASTER, Outbox
from rtp.core.frontend.streams import Stream, Streams
from rtp.core.frontend.timers import Timers
from rtp.core.messages import (
    AnyMessage,
    Cancel,
    Grant,
    Refuse,
    Rejected,
    TokenRun,
    Tokens,
    WorkerLost,
)
from rtp.core.phases import TERMINAL, Phase, move
from rtp.core.ports import Detokenizer
from rtp.core.types import FrontendId, RequestId, WorkerId

BLAMELESS = frozenset({"tombstone", "preempted", "unknown"})
"""Rejections after which the same worker may well take the next attempt."""


@dataclass(slots=True)
class Counters:
    """Since the start; each only grows."""

    begun: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    replacements: int = 0
    resumes: int = 0
    """Replacements after the first token."""
    reconnects: int = 0
    duplicates: int = 0
    gaps: int = 0
    strays: int = 0
    """Runs of requests and attempts that are over."""


class Frontend:
    """Every request begun ends with exactly one Ended or Failed, or with its client's leaving."""

    def __init__(
        self,
        frontend_id: FrontendId,
        detokenizer: Callable[[str, bool], Detokenizer],
        *,
        max_replacements: int = 8,
        reconnect_s: float = 1.0,
        max_cancelled: int = 4096,
    ) -> None:
        """detokenizer: (model, skip_special_tokens) -> a Detokenizer for one choice.
        reconnect_s: how long a broken stream may take to come back before its requests move on.
        max_cancelled: how many cancelled attempts are remembered, so that each is told once.
        """
        self.counters = Counters()
        self._id = frontend_id
        self._detokenizer = detokenizer
        self._max_replacements = max_replacements
        self._reconnect_s = reconnect_s
        self._requests: dict[RequestId, Request] = {}
        self._dirty: dict[RequestId, Request] = {}  # may have something to deliver
        self._behind: dict[RequestId, Request] = {}  # missed something their worker has sent
        self._streams = Streams()
        self._timers = Timers()
        self._outbox = Outbox(max_cancelled)
        self._now = 0.0

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event; returns what to do, in order.

        Cost: O(tokens and characters in it); for a broken stream or lost worker O(its requests).
        """
        self._now = now
        match event:
            case From():
                self._receive(WorkerId(event.peer), event.message)
            case Tick():
                self._tick()
            case Begin():
                self._begin(event)
            case ClientGone():
                self._client_gone(event.request_id)
            case ClientPaused():
                self._client_paused(event.request_id)
            case ClientReady():
                self._client_ready(event.request_id)
            case StreamUp():
                self._stream_up(event)
            case StreamDown():
                self._stream_down(event)
            case MasterUp():
                self._master_up()
            case MasterDown():
                pass  # streams run on without a Master; what is asked is asked again at MasterUp
            case _:
                raise TypeError(f"not an event of a frontend: {type(event).__name__}")
        return self._outbox.collect()

    def next_deadline(self) -> float | None:
        """When to call with Tick: at once if the turn left something to send, else by timer."""
        if self._dirty or self._behind or self._outbox:
            return self._now
        return self._timers.next()

    def idle(self) -> bool:
        """No request lives and nothing waits to be sent."""
        return not (self._requests or self._dirty or self._behind or self._outbox)

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

    # ------------------------------------------------------------ clients

    def _begin(self, begin: Begin) -> None:
        request = Request(begin, self._detokenizer, self._now)
        self._requests[begin.request_id] = request
        self.counters.begun += 1
        self._ask(request)

    def _client_gone(self, request_id: RequestId) -> None:
        if request := self._requests.get(request_id):
            self.counters.cancelled += 1
            self._forget(request, Phase.CANCELLED, cancel="client_gone")

    def _client_paused(self, request_id: RequestId) -> None:
        if request := self._requests.get(request_id):
            request.paused = True

    def _client_ready(self, request_id: RequestId) -> None:
        if request := self._requests.get(request_id):
            request.paused = False
            self._outbox.owe_all(request)

    # ------------------------------------------------------------ messages

    def _receive(self, peer: WorkerId, message: AnyMessage) -> None:
        match message:
            case Tokens():
                for run in message.runs:
                    self._run(peer, run)
            case Grant():
                self._grant(message)
            case Refuse():
                self._refuse(message)
            case Rejected():
                self._rejected(peer, message)
            case WorkerLost():
                self._worker_lost(message)
            case _:
                raise TypeError(f"not a message to a frontend: {type(message).__name__}")

    def _grant(self, grant: Grant) -> None:
        request = self._requests.get(grant.request_id)
        if request is None or grant.attempt < request.attempt:
            cancel = Cancel(grant.request_id, grant.attempt, "stale_grant")
            self._outbox.send(MASTER, cancel)
            return
        if request.phase is not Phase.QUEUED:
            return  # the answer to an Ask that was repeated
        stream = self._streams.get(grant.worker_id)
        if stream is not None and stream.epoch < grant.epoch:
            self._give_up(stream, "worker_restarted", blame=False)
            stream = None
        if stream is None:
            stream = self._streams.open(grant)
            self._outbox.add(stream.connect(self._now))
        request.place(grant)
        stream.requests[grant.request_id] = request
        if grant.epoch < stream.epoch:
            self._displace(request, "worker_restarted")  # granted to a life that is over
            return
        if not stream.up:
            request.connect_by = self._now + grant.lease_s
        self._set_timer(request)
        self._outbox.send(grant.worker_id, request.submit(self._now))

    def _refuse(self, refusal: Refuse) -> None:
        request = self._requests.get(refusal.request_id)
        if request is None or request.attempt != refusal.attempt:
            return
        if request.phase is Phase.QUEUED:
            self._fail(request, failures.refused(refusal), cancel="")

    def _run(self, worker_id: WorkerId, run: TokenRun) -> None:
        request = self._requests.get(run.request_id)
        if request is None or not request.runs(worker_id, run.attempt):
            self.counters.strays += 1
            if request is None or run.attempt < request.attempt:
                self._outbox.cancel(worker_id, run.request_id, run.attempt, "stale")
            return
        match request.accept(run):
            case Taken.NEW:
                self._dirty[run.request_id] = request
                self._outbox.owe(request, run.choice)
                if request.ttft_deadline is not None:
                    self._set_timer(request)
            case Taken.DUPLICATE:
                self.counters.duplicates += 1
                self._outbox.owe(request, run.choice)
            case Taken.GAP:
                self.counters.gaps += 1
                self._outbox.note("tokens.gap_found", request_id=run.request_id)
                self._resync(request)
            case Taken.FAILED:
                self._fail(request, failures.numeric_fault(run.request_id))

    def _rejected(self, worker_id: WorkerId, rejection: Rejected) -> None:
        request = self._requests.get(rejection.request_id)
        if request is None or not request.runs(worker_id, rejection.attempt):
            return
        if rejection.retry:
            self._displace(request, rejection.reason, blame=rejection.reason not in BLAMELESS)
        else:
            self._fail(request, failures.rejected(rejection))

    def _worker_lost(self, lost: WorkerLost) -> None:
        stream = self._streams.get(lost.worker_id)
        if stream is not None and stream.epoch <= lost.epoch:
            self._give_up(stream, "worker_lost", blame=True)

    # ------------------------------------------------------------ connections

    def _stream_up(self, event: StreamUp) -> None:
        stream = self._streams.get(event.worker_id)
        if stream is None or event.epoch < stream.epoch:
            return
        if event.epoch > stream.epoch:
            self._give_up(stream, "worker_restarted", blame=False)
            return
        self._outbox.doubt(event.worker_id)
        resync = stream.reopening
        stream.up = True
        stream.reopening = False
        for request in stream.requests.values():
            request.connect_by = None
            self._set_timer(request)
            if resync:
                self._resync(request)

    def _stream_down(self, event: StreamDown) -> None:
        stream = self._streams.get(event.worker_id)
        if stream is None:
            return
        stream.up = False
        if event.refused or stream.reopening or not stream.requests:
            self._give_up(stream, "stream_lost", blame=True)
            return
        self.counters.reconnects += 1
        stream.reopening = True
        for request in stream.requests.values():
            request.connect_by = self._now + self._reconnect_s
            self._set_timer(request)
        self._outbox.add(stream.connect(self._now))

    def _master_up(self) -> None:
        for request in self._requests.values():
            if request.phase is Phase.QUEUED:
                self._ask(request)

    # ------------------------------------------------------------ the end of a turn

    def _tick(self) -> None:
        self._outbox.acknowledge()
        dirty, self._dirty = self._dirty, {}
        for request in dirty.values():
            self._deliver(request)
            if request.finished:
                self._end(request)
        behind, self._behind = self._behind, {}
        for request in behind.values():  # a Submit that is known makes the worker send again
            if request.grant is not None:
                self._outbox.send(request.grant.worker_id, request.submit(self._now))
        for request_id in self._timers.due(self._now):
            self._look_at(self._requests[request_id])

    def _look_at(self, request: Request) -> None:
        """A timer fired: the request's time is over, or its worker's stream did not open."""
        if request.expired(self._now):
            self._fail(request, failures.timed_out(request.begin.request_id))
            return
        stream = self._streams.of(request)
        blame = self._now - stream.since >= self._reconnect_s  # else just slower than the lease
        self._displace(request, "stream_slow", blame=blame, cancel=True)

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

    # ------------------------------------------------------------ steps of a life

    def _ask(self, request: Request) -> None:
        self._set_timer(request)
        self._outbox.send(MASTER, request.ask(self._id, self._now))

    def _resync(self, request: Request) -> None:
        """Asks the worker, at the turn's end, for everything from the next token wanted on."""
        self._behind[request.begin.request_id] = request
        self._outbox.owe_all(request)

    def _displace(
        self, request: Request, reason: str, *, blame: bool = False, cancel: bool = False
    ) -> None:
        """The current attempt is lost: asks for another place, or ends what cannot go on."""
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
        request.displace(worker_id if blame else None)
        self.counters.replacements += 1
        self.counters.resumes += request.first_token
        if request.first_token:
            self._dirty[request_id] = request  # a concluded choice
        if request.replacements > self._max_replacements:
            self._fail(request, failures.no_worker(request_id))
        else:
            self._ask(request)

    def _give_up(self, stream: Stream, reason: str, *, blame: bool) -> None:
        """Forgets a stream; its requests go elsewhere."""
        for request in self._streams.close(stream):
            self._displace(request, reason, blame=blame, cancel=stream.up)

    def _fail(self, request: Request, failure: Failed, *, cancel: str = "failed") -> None:
        """Ends a request with an error, after what it has produced so far."""
        self.counters.failed += 1
        self._deliver(request)
        rejected = request.phase is Phase.QUEUED and request.attempt == 1
        self._forget(request, Phase.REJECTED if rejected else Phase.FAILED, cancel=cancel)
        self._outbox.add(failure)

    def _forget(self, request: Request, phase: Phase, *, cancel: str = "") -> None:
        """Removes every trace; `cancel` is the reason told to the worker and the Master."""
        request_id = request.begin.request_id
        if cancel:
            if request.grant is not None:
                self._outbox.cancel(request.grant.worker_id, request_id, request.attempt, cancel)
            self._outbox.send(MASTER, Cancel(request_id, request.attempt, cancel))
        self._streams.remove(request)
        request.phase = move(request.phase, phase)
        request.grant = None
        del self._requests[request_id]
        self._dirty.pop(request_id, None)
        self._behind.pop(request_id, None)
        self._timers.remove(request_id)

    def _set_timer(self, request: Request) -> None:
        self._timers.set(request.begin.request_id, request.next_timer())

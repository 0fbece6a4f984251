"""The frontend's decisions: requests of clients, grants of the Master, streams of the workers.

Input of a turn changes state; what can be gathered (acknowledgements, text for clients) leaves
with the Tick that ends the turn. A request is placed anew only when its attempt can give nothing
more: the stream of a worker that may live is opened again first, and goes on with the next token.
"""

from __future__ import annotations

from collections.abc import Callable

from rtp.core.commands import Command
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
from rtp.core.frontend.lives import Counters, Lives
from rtp.core.frontend.outbox import MASTER, Outbox
from rtp.core.frontend.streams import Stream, Streams
from rtp.core.messages import (
    AnyMessage,
    Cancel,
    Grant,
    Place,
    Refuse,
    Rejected,
    TokenRun,
    Tokens,
    WorkerLost,
)
from rtp.core.phases import Phase
from rtp.core.ports import Detokenizer
from rtp.core.types import FrontendId, RequestId, WorkerId

BLAMELESS = frozenset({"tombstone", "preempted", "unknown"})
"""Rejections after which the same worker may well take the next attempt."""


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
        self._detokenizer = detokenizer
        self._reconnect_s = reconnect_s
        self._streams = Streams()
        self._outbox = Outbox(max_cancelled)
        self._lives = Lives(frontend_id, self._outbox, self._streams, max_replacements)
        self._now = 0.0

    @property
    def counters(self) -> Counters:
        return self._lives.counters

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
        if self._outbox or self._lives.unsent:
            return self._now
        return self._lives.next_timer()

    def idle(self) -> bool:
        """No request lives and nothing waits to be sent."""
        return not (self._lives or self._outbox)

    def check(self) -> None:
        """Raises AssertionError where the tables disagree. Cost: O(requests)."""
        self._lives.check()

    # ------------------------------------------------------------ clients

    def _begin(self, begin: Begin) -> None:
        self._lives.begin(Request(begin, self._detokenizer, self._now), self._now)

    def _client_gone(self, request_id: RequestId) -> None:
        if request := self._lives.get(request_id):
            self._lives.leave(request)

    def _client_paused(self, request_id: RequestId) -> None:
        if request := self._lives.get(request_id):
            request.paused = True

    def _client_ready(self, request_id: RequestId) -> None:
        if request := self._lives.get(request_id):
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
        request = self._lives.get(grant.request_id)
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
            stream = self._open(grant)
        if grant.decode is not None:
            self._expect(grant.decode)
        request.place(grant)
        stream.requests[grant.request_id] = request
        if grant.epoch < stream.epoch:
            self._lives.displace(
                request, self._now, "worker_restarted"
            )  # granted to a life that is over
            return
        if not stream.up:
            request.connect_by = self._now + grant.lease_s
        self._lives.set_timer(request)
        self._outbox.send(grant.worker_id, request.submit(self._now))

    def _expect(self, place: Place) -> None:
        """A hand-over is to come: the stream is opened meanwhile."""
        stream = self._streams.get(place.worker_id)
        if stream is not None and stream.epoch < place.epoch:
            self._give_up(stream, "worker_restarted", blame=False)
            stream = None
        if stream is None:
            self._open(place)

    def _open(self, place: Grant | Place) -> Stream:
        stream = self._streams.open(place)
        self._outbox.add(stream.connect(self._now))
        return stream

    def _refuse(self, refusal: Refuse) -> None:
        request = self._lives.get(refusal.request_id)
        if request is None or request.attempt != refusal.attempt:
            return
        if request.phase is Phase.QUEUED:
            self._lives.fail(request, failures.refused(refusal), cancel="")

    def _run(self, worker_id: WorkerId, run: TokenRun) -> None:
        request = self._lives.get(run.request_id)
        if request is None or not request.runs(worker_id, run.attempt):
            if request is not None and request.gave(worker_id, run.attempt):
                return  # repeated after a reconnect: all of it was taken before the hand-over
            self.counters.strays += 1
            if request is None or run.attempt < request.attempt:
                self._outbox.cancel(worker_id, run.request_id, run.attempt, "stale")
            return
        match request.accept(run):
            case Taken.NEW:
                self._lives.gained(request)
                self._outbox.owe(request, run.choice)
                if request.handed_over:
                    self._lives.hand_over(request, self._now)
                elif not request.needs_giver:
                    self._lives.release_giver(request)
                if request.ttft_deadline is not None:
                    self._lives.set_timer(request)
            case Taken.DUPLICATE:
                self.counters.duplicates += 1
                self._outbox.owe(request, run.choice)
            case Taken.GAP:
                self.counters.gaps += 1
                self._outbox.note("tokens.gap_found", request_id=run.request_id)
                self._lives.resync(request)
            case Taken.FAILED:
                self._lives.fail(request, failures.numeric_fault(run.request_id))

    def _rejected(self, worker_id: WorkerId, rejection: Rejected) -> None:
        request = self._lives.get(rejection.request_id)
        if request is None or not request.runs(worker_id, rejection.attempt):
            return
        if rejection.retry:
            self._lives.displace(
                request, self._now, rejection.reason, blame=rejection.reason not in BLAMELESS
            )
        else:
            self._lives.fail(request, failures.rejected(rejection))

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
            self._lives.set_timer(request)
            if resync:
                self._lives.resync(request)

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
            self._lives.set_timer(request)
        self._outbox.add(stream.connect(self._now))

    def _give_up(self, stream: Stream, reason: str, *, blame: bool) -> None:
        """Forgets a stream; its requests go elsewhere."""
        for request in self._streams.close(stream):
            self._lives.displace(request, self._now, reason, blame=blame, cancel=stream.up)

    def _master_up(self) -> None:
        for request in self._lives:
            if request.phase is Phase.QUEUED:
                self._lives.ask_if_due(request, self._now)

    # ------------------------------------------------------------ the end of a turn

    def _tick(self) -> None:
        self._outbox.acknowledge()
        self._lives.flush(self._now)
        for request in self._lives.due(self._now):
            self._look_at(request)

    def _look_at(self, request: Request) -> None:
        """A timer fired: the request's time is over, its worker's stream did not open, or it may
        ask again."""
        if request.expired(self._now):
            self._lives.fail(request, failures.timed_out(request.begin.request_id))
            return
        if request.phase is Phase.QUEUED:
            self._lives.ask_if_due(request, self._now)
            return
        stream = self._streams.of(request)
        blame = self._now - stream.since >= self._reconnect_s  # else just slower than the lease
        self._lives.displace(request, self._now, "stream_slow", blame=blame, cancel=True)

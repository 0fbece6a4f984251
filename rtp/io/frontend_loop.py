"""The asyncio driver of core.frontend: one Handle per request for HTTP, streams to the workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rtp.core.card import ModelCard
from rtp.core.commands import Command, Connect, Deliver, Ended, Failed, Note, Send
from rtp.core.events import (
    Begin,
    ClientGone,
    ClientPaused,
    ClientReady,
    From,
    MasterDown,
    MasterUp,
)
from rtp.core.messages import Ask, AskMessage, Cancel
from rtp.core.types import FrontendId, RequestId, WorkerId
from rtp.io.driver import Core, Driver, fault_note
from rtp.io.worker_stream import Streams

MASTER = "master"
PAUSE_BYTES = 256 << 10
"""Text waiting for one client above which its worker is told to wait (design section 5)."""


class FrontendLoop:
    """Drives one frontend. Build inside the running loop.

    to_master: carries an Ask or Cancel; a function call into the Master where both share a process.
    on_note: gets every Note.
    """

    def __init__(
        self,
        core: Core,
        *,
        frontend_id: FrontendId,
        secret: bytes,
        to_master: Callable[[Ask | Cancel], None],
        on_note: Callable[[Note], None],
    ) -> None:
        self.frontend_id = frontend_id
        self.models: dict[str, ModelCard] = {}
        """Models that workers have offered, by name."""
        self.driver = Driver(core, self._perform, self._fault)
        self._handles: dict[RequestId, Handle] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        """No further request is taken."""
        self._to_master = to_master
        self._on_note = on_note
        self._streams = Streams(
            secret=secret,
            frontend_id=frontend_id,
            on_event=self.driver.tell,
            on_closed=self._stream_closed,
        )

    def begin(self, begin: Begin) -> Handle:
        """Starts a request; what it brings comes through the Handle."""
        handle = Handle(begin.request_id, self.driver)
        if self.draining:
            handle.put(_stopping(begin.request_id))
            return handle
        self._handles[begin.request_id] = handle
        self._idle.clear()
        handle.on_end = lambda: self._ended(begin.request_id)
        self.driver.tell(begin)
        return handle

    def add_model(self, card: ModelCard, *, replace: bool = False) -> None:
        """A model is offered; the first card of a name is the one that counts, or `replace`."""
        known = card if replace else self.models.get(card.model, card)
        self.models[card.model] = known
        if known.digest() != card.digest():
            self._on_note(Note("card.conflicted", {"model": card.model, "revision": card.revision}))

    def master_up(self, term: int) -> None:
        self.driver.tell(MasterUp(term))

    def master_down(self) -> None:
        self.driver.tell(MasterDown())

    def from_master(self, message: AskMessage) -> None:
        self.driver.tell(From(MASTER, message))

    @property
    def open_requests(self) -> int:
        return len(self._handles)

    async def drain(self, grace_s: float) -> None:
        """Takes no further request and returns when none is open; those that still are after
        `grace_s` end with an error."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        for request_id, handle in list(self._handles.items()):
            handle.put(_stopping(request_id))
            self.driver.tell(ClientGone(request_id))

    def close(self) -> None:
        """Drops every stream; requests still open get no more."""
        self.driver.close()
        self._streams.close()

    def _perform(self, command: Command) -> None:
        match command:
            case Send(peer=peer, message=message):
                if peer == MASTER:
                    self._to_master(message)  # type: ignore[arg-type]  # the core asks or cancels
                else:
                    self._streams.send(WorkerId(peer), message)  # type: ignore[arg-type]
            case Deliver(request_id=request_id) | Ended(request_id=request_id):
                self._give(request_id, command)
            case Failed(request_id=request_id):
                self._give(request_id, command)
            case Connect(worker_id=worker_id, epoch=epoch, address=address):
                self._streams.connect(worker_id, epoch, address)
            case Note():
                self._on_note(command)
            case _:
                raise TypeError(f"not a command of a frontend: {type(command).__name__}")

    def _ended(self, request_id: RequestId) -> None:
        del self._handles[request_id]
        if not self._handles:
            self._idle.set()

    def _give(self, request_id: RequestId, command: Deliver | Ended | Failed) -> None:
        handle = self._handles.get(request_id)
        if handle is not None:
            handle.put(command)

    def _fault(self, error: Exception) -> None:
        self._on_note(fault_note("frontend", error))

    def _stream_closed(self, worker_id: str, reason: str) -> None:
        self._on_note(Note("stream.closed", {"worker_id": worker_id, "reason": reason}))


class Handle:
    """One request as HTTP sees it: Deliver commands, then exactly one Ended or Failed.

    Iterate it once, from one task. Text that is not fetched in time pauses the request by itself,
    at PAUSE_BYTES; cancel() on every way out, it does nothing once the end was reached.
    """

    __slots__ = (
        "_driver",
        "_over",
        "_paused",
        "_queue",
        "_text",
        "_waiter",
        "on_end",
        "request_id",
    )

    def __init__(self, request_id: RequestId, driver: Driver) -> None:
        self.request_id = request_id
        self.on_end: Callable[[], object] = lambda: None
        self._driver = driver
        self._queue: deque[Deliver | Ended | Failed] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._text = 0
        self._paused = False
        self._over = False

    def __aiter__(self) -> Handle:
        return self

    async def __anext__(self) -> Deliver | Ended | Failed:
        while not self._queue:
            if self._over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        command = self._queue.popleft()
        if isinstance(command, Deliver):
            self._text -= _size(command)
            if self._paused and self._text <= PAUSE_BYTES // 2:
                self.ready()
        return command

    def put(self, command: Deliver | Ended | Failed) -> None:
        """From the loop: the next thing for the client."""
        if self._over:
            return
        self._queue.append(command)
        if isinstance(command, Deliver):
            self._text += _size(command)
            if self._text > PAUSE_BYTES:
                self.paused()
        else:
            self._end()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def paused(self) -> None:
        """The client does not read: its worker shall wait."""
        if not self._paused and not self._over:
            self._paused = True
            self._driver.tell(ClientPaused(self.request_id))

    def ready(self) -> None:
        """The client reads again."""
        if self._paused:
            self._paused = False
            if not self._over:
                self._driver.tell(ClientReady(self.request_id))

    def cancel(self) -> None:
        """The client is gone: everything of the request is freed. Harmless after its end."""
        if not self._over:
            self._end()
            self._queue.clear()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
            self._driver.tell(ClientGone(self.request_id))

    def _end(self) -> None:
        self._over = True
        self.on_end()


def _stopping(request_id: RequestId) -> Failed:
    code, text = "service_unavailable", "The server is stopping"
    return Failed(request_id, 503, "server_error", code, text, retry_after_s=1.0)


def _size(command: Deliver) -> int:
    return sum(len(chunk.text) for chunk in command.chunks)

"""A server-sent event stream: exact bytes, keep-alive comments, word of a reader falling behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


class Source(Protocol):
    """What produces the events: it is told when the reader falls behind, and when it caught up."""

    def paused(self) -> None: ...

    def ready(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SseTimes:
    """Quiet time before a comment, unsent bytes that pause, how long a paused reader may take."""

    keepalive_s: float = 15.0
    high_bytes: int = 256 * 1024
    patience_s: float = 60.0


class SseStream:
    """The stream that answers `request`; send() raises ConnectionError once the client is gone.

    Status and headers go out with the first event: until then an error can still be a status.
    """

    def __init__(self, request: web.Request, sources: Sequence[Source], times: SseTimes) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._sources = sources
        self._times = times
        self._writer: AbstractStreamWriter | None = None
        self._beat: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._loop.time()
        self._stalled = False

    @property
    def is_open(self) -> bool:
        """Whether the status line is out, so that errors can no longer be a status."""
        return self._writer is not None

    async def send(self, data: bytes) -> None:
        """Writes events; over `high_bytes` unsent, the sources are paused until most are gone."""
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        writer = self._writer or await self._open(transport)
        self._last_sent = self._loop.time()
        if transport.get_write_buffer_size() + len(data) <= self._times.high_bytes:
            await writer.write(data)
        else:
            await self._send_slowly(data, transport, writer)

    async def fail(self, error: bytes) -> None:
        """The error as the last event, without [DONE]. The connection stays: the body ends in
        order, and a client that keeps the connection would lose its next request (cases O07)."""
        with suppress(ConnectionError):
            await self.send(event(error))

    async def close(self) -> None:
        """Ends the body. May be called at any time, also when nothing was sent."""
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        if self._writer is not None:
            with suppress(ConnectionError):
                await self.response.write_eof()

    async def _open(self, transport: asyncio.Transport) -> AbstractStreamWriter:
        transport.set_write_buffer_limits(high=self._times.high_bytes)
        writer = await self.response.prepare(self._request)
        if writer is None:
            raise ConnectionResetError("the client is gone")
        if self._writer is None:  # else another prompt's first event came in meanwhile
            self._writer = writer
            self._beat = asyncio.create_task(self._keep_alive())
        return writer

    async def _send_slowly(
        self, data: bytes, transport: asyncio.Transport, writer: AbstractStreamWriter
    ) -> None:
        self._stalled = True
        for source in self._sources:
            source.paused()
        try:
            async with asyncio.timeout(self._times.patience_s):
                await writer.write(data)
                await writer.drain()
        except TimeoutError:
            transport.abort()
            raise ConnectionResetError("the client does not read") from None
        finally:
            self._stalled = False
        for source in self._sources:
            source.ready()

    async def _keep_alive(self) -> None:
        """A comment after each quiet period, so that no proxy takes the stream for dead (S13)."""
        period = self._times.keepalive_s
        while True:
            await asyncio.sleep(max(0.0, self._last_sent + period - self._loop.time()))
            if self._loop.time() < self._last_sent + period:
                continue
            if self._stalled:
                self._last_sent = self._loop.time()
                continue
            with suppress(ConnectionError):  # the sender will see it too
                await self.send(COMMENT)


def event(data: bytes) -> bytes:
    """One event of one line of JSON."""
    return b"data: " + data + b"\n\n"

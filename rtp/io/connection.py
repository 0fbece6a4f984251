"""A connection of frames over an asyncio transport: batched writing, bounded buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from rtp.core.errors import ProtocolError
from rtp.core.messages import AnyMessage
from rtp.io.codec import FrameDecoder, frame

MAX_UNSENT_BYTES = 64 << 20
"""A peer that leaves more than this unread is cut: every backlog the protocol allows is far
smaller."""


class FrameConnection(asyncio.Protocol):
    """Frames both ways once attached to a transport.

    decoder: takes what the peer may send.  on_message: called per message, on arrival.  on_closed:
    called exactly once, with the reason.  Garbage closes this connection and nothing else.
    """

    def __init__(
        self,
        decoder: FrameDecoder[Any],  # Any: the union differs per side
        on_message: Callable[[Any], None],
        on_closed: Callable[[str], None],
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self._decoder = decoder
        self._on_message = on_message
        self._on_closed = on_closed
        self._max_unsent = max_unsent_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._flush: asyncio.Handle | None = None
        self._reason = ""
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def attach(self, transport: asyncio.Transport) -> None:
        """Takes a transport over from the protocol that did the handshake."""
        self._transport = transport
        transport.set_protocol(self)
        self.flush()

    def send(self, message: AnyMessage) -> None:
        """Queues a frame; all of a loop turn leave in one write, and what came before attach()
        with it. Dropped once closed."""
        if self._closed:
            return
        self._outgoing.append(frame(message))
        if self._flush is None:
            self._flush = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Writes what is queued now."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if self._transport is None or self._closed or not self._outgoing:
            return
        self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()
        if self._transport.get_write_buffer_size() > self._max_unsent:
            self.abort(f"the peer left over {self._max_unsent} bytes unread")

    def close(self, reason: str = "closed here") -> None:
        """Writes what is queued, then closes; on_closed follows."""
        self.flush()
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Closes at once, whatever is unsent; on_closed follows."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._reason:
            return
        try:
            for message in self._decoder.feed(data):
                self._on_message(message)
        except ProtocolError as error:
            self.abort(f"protocol error: {error}")

    def eof_received(self) -> bool:
        return False  # close

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closed:
            return
        self._closed = True
        if self._flush is not None:
            self._flush.cancel()
        self._outgoing.clear()
        self._on_closed(self._reason or (str(exc) if exc else "the peer closed it"))

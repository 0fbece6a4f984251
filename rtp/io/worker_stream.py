"""A frontend's end of its streams to workers: prompts out, tokens back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rtp.core.errors import ConfigError, ProtocolError
from rtp.core.events import Event, From, StreamDown, StreamUp
from rtp.core.messages import StreamMessage
from rtp.core.types import FrontendId, WorkerId
from rtp.io.codec import FrameDecoder, ToFrontend
from rtp.io.connection import FrameConnection
from rtp.io.handshake import Claim, new_nonce
from rtp.io.upgrade import Refused, dial


class Streams:
    """One stream per worker, opened on demand.

    on_event: gets StreamUp, StreamDown and From.  on_closed(worker_id, reason): for the log.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        frontend_id: FrontendId,
        on_event: Callable[[Event], None],
        on_closed: Callable[[str, str], None],
    ) -> None:
        self._secret = secret
        self._frontend_id = frontend_id
        self._on_event = on_event
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._streams: dict[WorkerId, _Stream] = {}

    def connect(self, worker_id: WorkerId, epoch: int, address: str) -> None:
        """Opens the stream to this life of a worker, in place of one to an earlier life."""
        self._drop(worker_id)
        stream = _Stream(worker_id, self._from, self._lost)
        self._streams[worker_id] = stream
        claim = Claim("stream", worker_id, epoch, self._frontend_id, new_nonce())
        stream.task = self._loop.create_task(self._open(stream, claim, address))

    def send(self, worker_id: WorkerId, message: StreamMessage) -> None:
        """Queues a frame; before the stream is open it waits, without a stream it is dropped."""
        stream = self._streams.get(worker_id)
        if stream is not None:
            stream.connection.send(message)

    def close(self) -> None:
        for worker_id in list(self._streams):
            self._drop(worker_id)

    async def _open(self, stream: _Stream, claim: Claim, address: str) -> None:
        refused, reason = False, ""
        try:
            await dial(address, claim, self._secret, stream.connection)
        except Refused as error:
            refused, reason = True, str(error)
        except TimeoutError:
            reason = f"no answer from {address}"
        except (OSError, ProtocolError, ConfigError) as error:
            reason = str(error)
        if self._streams.get(stream.worker_id) is not stream:
            return  # replaced, or closed right behind the handshake
        if reason:
            del self._streams[stream.worker_id]
            self._on_closed(stream.worker_id, reason)
            self._on_event(StreamDown(stream.worker_id, refused))
        else:
            self._on_event(StreamUp(stream.worker_id, claim.epoch))

    def _from(self, stream: _Stream, message: StreamMessage) -> None:
        if self._streams.get(stream.worker_id) is stream:
            self._on_event(From(stream.worker_id, message))

    def _lost(self, stream: _Stream, reason: str) -> None:
        if self._streams.get(stream.worker_id) is stream:
            del self._streams[stream.worker_id]
            self._on_closed(stream.worker_id, reason)
            self._on_event(StreamDown(stream.worker_id))

    def _drop(self, worker_id: WorkerId) -> None:
        stream = self._streams.pop(worker_id, None)
        if stream is not None:
            if stream.task is not None:
                stream.task.cancel()
            stream.connection.close()


class _Stream:
    """One stream, opening or open."""

    __slots__ = ("connection", "task", "worker_id")

    def __init__(
        self,
        worker_id: WorkerId,
        on_message: Callable[[_Stream, StreamMessage], None],
        on_lost: Callable[[_Stream, str], None],
    ) -> None:
        self.worker_id = worker_id
        self.task: asyncio.Task[None] | None = None
        self.connection = FrameConnection(
            FrameDecoder(ToFrontend),
            lambda message: on_message(self, message),
            lambda reason: on_lost(self, reason),
        )

"""The Master's end of its connections to frontends in other processes: asks in, grants out.

A frontend dials the Master's HTTP port (io/handshake, kind "ask"). What it sends is taken in
rotation with the others', at most ASKS_A_TURN messages a loop turn: one that sends a lot, or asks
everything again after a restart, makes no long turn and holds nobody up. What has no room waits
here, and its connection is not read meanwhile. All answers of a turn leave in one write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiohttp import web

from rtp.core.commands import Note
from rtp.core.errors import ProtocolError
from rtp.core.events import Event, From, FrontendDown, FrontendUp
from rtp.core.messages import Ask, Cancel, Grant, Refuse, WorkerLost
from rtp.core.types import FrontendId
from rtp.io.codec import FrameDecoder, FromAsker
from rtp.io.connection import FrameConnection
from rtp.io.handshake import ASK_KIND, MASTER, PATHS, Claim
from rtp.io.upgrade import accept

ASKS_A_TURN = 16
MAX_FRONTENDS = 64
MAX_UNSENT_BYTES = 16 << 20
SLICE_BYTES = 16 << 10
"""Decoded at once, so that a read full of small frames is no long turn either."""


class AskLinks:
    """Accepts frontends and carries frames. Everything that happens is told as an event.

    on_event: gets FrontendUp, FrontendDown and From.  on_note: for the log.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        term: int,
        on_event: Callable[[Event], None],
        on_note: Callable[[Note], None],
    ) -> None:
        self._secret = secret
        self._term = term
        self._on_event = on_event
        self._on_note = on_note
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, _AskLink] = {}
        self._waiting: deque[_AskLink] = deque()
        self._left = 0
        self._turn: asyncio.Handle | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._links)

    def route(self) -> web.RouteDef:
        """Where frontends dial; to be added to the process's HTTP server."""
        return web.get(PATHS[ASK_KIND], self._accept, allow_head=False)

    def send(self, frontend_id: str, message: Grant | Refuse | WorkerLost) -> bool:
        """Queues a frame, written with the others of the turn; False: no such frontend is here."""
        link = self._links.get(frontend_id)
        if link is not None:
            link.send(message)
        return link is not None

    def close(self) -> None:
        """Ends every connection, what was answered first; who dials again is refused."""
        self._closed = True
        if self._turn is not None:
            self._turn.cancel()
        for link in list(self._links.values()):
            link.close("this Master ends")
            self._down(link, "this Master ends")

    # ------------------------------------------------------------ connections

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        try:
            return await accept(
                request, ASK_KIND, self._secret, self._admit, self._open, about=str(self._term)
            )
        except ProtocolError as error:
            return web.Response(status=400, text=str(error))

    def _admit(self, claim: Claim) -> str:
        """Why a frontend is refused; '' if it is not."""
        if self._closed:
            return "this Master ends"
        if claim.worker_id != MASTER:
            return "this is the Master"
        if claim.epoch > self._term:
            return f"this is term {self._term}; a Master of term {claim.epoch} was met"
        if len(self._links) >= MAX_FRONTENDS and claim.peer not in self._links:
            return f"{MAX_FRONTENDS} frontends are connected"
        return ""

    def _open(self, claim: Claim) -> FrameConnection:
        """A proved connection; it takes the place of this frontend's earlier one."""
        frontend_id = FrontendId(claim.peer)
        earlier = self._links.get(frontend_id)
        if earlier is not None:
            earlier.abort("another connection took its place")
            self._down(earlier, "another connection took its place")
        link = _AskLink(frontend_id, self._received, self._down)
        self._links[frontend_id] = link
        self._on_note(Note("frontend.joined", {"frontend_id": frontend_id}))
        self._on_event(FrontendUp(frontend_id))
        return link

    def _down(self, link: _AskLink, reason: str) -> None:
        if self._links.get(link.frontend_id) is link:
            del self._links[link.frontend_id]
            facts: dict[str, object] = {"frontend_id": link.frontend_id, "reason": reason}
            self._on_note(Note("frontend.left", facts))
            self._on_event(FrontendDown(link.frontend_id))

    # ------------------------------------------------------------ what frontends say

    def _received(self, link: _AskLink) -> None:
        """There is something to take, and there was not before."""
        self._waiting.append(link)
        if self._turn is None:
            self._begin_turn()
        self._take()

    def _begin_turn(self) -> None:
        self._left = ASKS_A_TURN
        self._turn = self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn = None
        if self._waiting:
            self._begin_turn()
            self._take()

    def _take(self) -> None:
        """Hands on what the turn has room for, a message of each in rotation."""
        while self._waiting and self._left:
            link = self._waiting.popleft()
            if self._links.get(link.frontend_id) is not link:
                continue  # gone, and its asks with it
            message = link.take()
            if message is not None:
                self._left -= 1
                self._on_event(From(link.frontend_id, message))
            if link.has_more():
                self._waiting.append(link)
        for link in self._waiting:
            link.hold()


class _AskLink(FrameConnection):
    """One frontend's connection: what arrives waits here until a turn takes it."""

    def __init__(
        self,
        frontend_id: FrontendId,
        on_data: Callable[[_AskLink], None],
        on_lost: Callable[[_AskLink, str], None],
    ) -> None:
        self._asks: FrameDecoder[Ask | Cancel] = FrameDecoder(FromAsker)
        super().__init__(
            self._asks,
            lambda message: None,
            lambda reason: on_lost(self, reason),
            MAX_UNSENT_BYTES,
        )
        self.frontend_id = frontend_id
        self._on_data = on_data
        self._unread: deque[memoryview] = deque()
        self._messages: deque[Ask | Cancel] = deque()
        self._held = False

    def data_received(self, data: bytes) -> None:
        if self._reason:
            return
        first = not self.has_more()
        view = memoryview(data)
        self._unread.extend(view[i : i + SLICE_BYTES] for i in range(0, len(view), SLICE_BYTES))
        if first:
            self._on_data(self)

    def has_more(self) -> bool:
        return bool(self._messages or self._unread)

    def take(self) -> Ask | Cancel | None:
        """The next whole message; garbage ends the connection."""
        try:
            while self._unread and not self._messages:
                self._messages.extend(self._asks.feed(self._unread.popleft()))
            message = self._messages.popleft() if self._messages else None
            if isinstance(message, Ask) and message.frontend_id != self.frontend_id:
                raise ProtocolError("an Ask of another frontend")
        except ProtocolError as error:
            self._unread.clear()
            self._messages.clear()
            self.abort(f"protocol error: {error}")
            return None
        if self._held and not self.has_more():
            self._held = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        return message

    def hold(self) -> None:
        """Reads no more until all of it has been taken: its sender has to wait."""
        if not self._held and self._transport is not None and not self._transport.is_closing():
            self._held = True
            self._transport.pause_reading()

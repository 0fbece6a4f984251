"""The Master's end of its links to workers: sockets in one epoll, read in batches.

Reading every frame as it comes would wake the loop for each: a third of the cost of many links is
waking up. With few links the loop is woken at once, with more a 5 ms timer drains all that waits.
At most eight sockets and 96 KB are read a turn, however much waits (a worker that comes back sends
all it holds), so that arrivals never wait behind reports; the rest keeps its place.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from typing import Any

from rtp.core.errors import ConfigError, ProtocolError
from rtp.core.events import Event, From, LinkDown, LinkUp
from rtp.core.messages import LinkMessage
from rtp.core.types import WorkerId
from rtp.io import addresses
from rtp.io.codec import FrameDecoder, ToMaster, frame
from rtp.io.connection import MAX_UNSENT_BYTES
from rtp.io.handshake import Claim, new_nonce
from rtp.io.upgrade import HANDSHAKE_S, MAX_HEAD_BYTES, Refused, read_answer, request_head

EAGER_LINKS = 8
"""Up to so many links the loop is woken by each frame."""
DRAIN_S = 0.005
SOCKETS_A_TURN = 8
BYTES_A_TURN = 96 << 10
"""A hundred Statuses, or 6,000 keys, which take the map some 6 ms. With a third of it a Master that
is busy all the time fell behind its workers: grants were seen too late and their leases expired."""


class Links:
    """Dials workers and carries frames. Everything that happens is told as an event.

    on_event: gets LinkUp, LinkDown and From.  on_closed(worker_id, reason): for the log, once per
    link or dial that ended other than by hang_up().
    """

    def __init__(
        self,
        *,
        secret: bytes,
        term: int,
        on_event: Callable[[Event], None],
        on_closed: Callable[[str, str], None],
    ) -> None:
        self._secret = secret
        self._term = term
        self._on_event = on_event
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._buffer = bytearray(BYTES_A_TURN)
        self._dials: dict[WorkerId, tuple[int, asyncio.Task[None]]] = {}
        self._links: dict[WorkerId, _Link] = {}
        self._by_fd: dict[int, _Link] = {}
        self._unsent: dict[WorkerId, _Link] = {}
        self._flush: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._epoll.fileno(), self._drain)
        self._eager = True
        self._closed = False

    def __len__(self) -> int:
        return len(self._links)

    def dial(self, worker_id: WorkerId, epoch: int, address: str) -> None:
        """Opens the link to this life of a worker in place of any other; answered by an event."""
        self._drop(worker_id)
        task = self._loop.create_task(self._dial(worker_id, epoch, address))
        self._dials[worker_id] = (epoch, task)

    def hang_up(self, worker_id: WorkerId, epoch: int) -> bool:
        """Closes the link, or stops the dial, of this life; no event follows. Returns whether there
        was one."""
        link, dial = self._links.get(worker_id), self._dials.get(worker_id)
        found = (link is not None and link.epoch == epoch) or (
            dial is not None and dial[0] == epoch
        )
        if found:
            self._drop(worker_id)
        return found

    def send(self, worker_id: WorkerId, message: LinkMessage) -> None:
        """Queues a frame, written at the end of the turn; dropped when there is no link."""
        link = self._links.get(worker_id)
        if link is None:
            return
        link.unsent += frame(message)
        self._unsent[worker_id] = link
        if self._flush is None:
            self._flush = self._loop.call_soon(self._write_all)

    def close(self) -> None:
        """Closes everything; harmless the second time."""
        if self._closed:
            return
        self._closed = True
        for worker_id in list(self._links.keys() | self._dials.keys()):
            self._drop(worker_id)
        for handle in (self._flush, self._timer):
            if handle is not None:
                handle.cancel()
        if self._eager:
            self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    # ------------------------------------------------------------ dialling

    async def _dial(self, worker_id: WorkerId, epoch: int, address: str) -> None:
        refused, reason = False, ""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                sock, rest = await self._handshake(worker_id, epoch, address)
        except (ConnectionRefusedError, Refused) as error:
            refused, reason = True, str(error)
        except TimeoutError:
            reason = f"no answer from {address} within {HANDSHAKE_S:g} s"
        except (OSError, ProtocolError, ConfigError) as error:
            reason = str(error)
        del self._dials[worker_id]
        if reason:
            self._on_closed(worker_id, reason)
            self._on_event(LinkDown(worker_id, epoch, refused))
            return
        link = _Link(sock, worker_id, epoch)
        self._links[worker_id] = self._by_fd[sock.fileno()] = link
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self._pace()
        self._on_event(LinkUp(worker_id, epoch))
        self._take(link, memoryview(rest))

    async def _handshake(
        self, worker_id: WorkerId, epoch: int, address: str
    ) -> tuple[socket.socket, bytes]:
        """A proved socket, and what came right behind the worker's answer."""
        host, port = addresses.split(address)
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        claim = Claim("link", worker_id, epoch, str(self._term), new_nonce())
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.sock_connect(sock, where)
            await self._loop.sock_sendall(sock, request_head(claim, address))
            received = b""
            while b"\r\n\r\n" not in received:
                data = await self._loop.sock_recv(sock, MAX_HEAD_BYTES)
                if not data or len(received) > MAX_HEAD_BYTES:
                    raise ProtocolError(f"no whole answer from {address}")
                received += data
            head, _, rest = received.partition(b"\r\n\r\n")
            await self._loop.sock_sendall(sock, read_answer(head, self._secret, claim))
        except BaseException:
            sock.close()
            raise
        return sock, rest

    def _drop(self, worker_id: WorkerId) -> None:
        dial = self._dials.pop(worker_id, None)
        if dial is not None:
            dial[1].cancel()
        link = self._links.pop(worker_id, None)
        if link is not None:
            link.closed = True
            self._unsent.pop(worker_id, None)
            del self._by_fd[link.sock.fileno()]
            self._epoll.unregister(link.sock.fileno())
            link.sock.close()
            self._pace()

    # ------------------------------------------------------------ reading and writing

    def _pace(self) -> None:
        """Chooses between waking at once and draining by the timer."""
        eager = len(self._links) <= EAGER_LINKS
        if eager == self._eager:
            return
        self._eager = eager
        if eager:
            self._loop.add_reader(self._epoll.fileno(), self._drain)
        else:
            self._loop.remove_reader(self._epoll.fileno())
            self._timer = self._loop.call_later(DRAIN_S, self._drain_by_timer)

    def _drain_by_timer(self) -> None:
        if self._eager:
            return
        more = self._drain()
        self._timer = self._loop.call_later(0 if more else DRAIN_S, self._drain_by_timer)

    def _drain(self) -> bool:
        """Reads sockets that wait, each once, as many and as much as a turn may; whether some may
        be left."""
        ready = self._epoll.poll(0, SOCKETS_A_TURN)
        left = BYTES_A_TURN
        for fd, mask in ready:
            link = self._by_fd.get(fd)
            if link is None:
                continue  # dropped by an event of this very turn
            if mask & select.EPOLLOUT:
                self._write(link)
            if left and mask & ~select.EPOLLOUT and not link.closed:
                left -= self._read(link, left)
        return len(ready) == SOCKETS_A_TURN or not left

    def _read(self, link: _Link, most: int) -> int:
        """Takes at most so many bytes; returns how many there were."""
        try:
            size = link.sock.recv_into(self._buffer, most)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._lose(link, str(error))
            return 0
        if not size:
            self._lose(link, "the worker closed it")
            return 0
        self._take(link, memoryview(self._buffer)[:size])
        return size

    def _take(self, link: _Link, data: memoryview) -> None:
        worker_id, epoch = link.worker_id, link.epoch
        try:
            for message in link.decoder.feed(data):
                if message.worker_id != worker_id or message.epoch != epoch:
                    raise ProtocolError("a message of another worker or epoch")
                self._on_event(From(worker_id, message))
                if link.closed:
                    return
        except ProtocolError as error:
            self._lose(link, f"protocol error: {error}")

    def _write_all(self) -> None:
        self._flush = None
        links, self._unsent = self._unsent, {}
        for link in links.values():
            self._write(link)

    def _write(self, link: _Link) -> None:
        if link.closed:
            return
        try:
            while link.unsent:
                del link.unsent[: link.sock.send(link.unsent)]
        except BlockingIOError:
            if len(link.unsent) > MAX_UNSENT_BYTES:
                self._lose(link, f"the worker left over {MAX_UNSENT_BYTES} bytes unread")
                return
        except OSError as error:
            self._lose(link, str(error))
            return
        wanted = select.EPOLLIN | (select.EPOLLOUT if link.unsent else 0)
        if wanted != link.watched:
            link.watched = wanted
            self._epoll.modify(link.sock.fileno(), wanted)

    def _lose(self, link: _Link, reason: str) -> None:
        self._drop(link.worker_id)
        self._on_closed(link.worker_id, reason)
        self._on_event(LinkDown(link.worker_id, link.epoch))


class _Link:
    """One open link."""

    __slots__ = ("closed", "decoder", "epoch", "sock", "unsent", "watched", "worker_id")

    def __init__(self, sock: socket.socket, worker_id: WorkerId, epoch: int) -> None:
        self.sock = sock
        self.worker_id = worker_id
        self.epoch = epoch
        self.decoder: FrameDecoder[Any] = FrameDecoder(ToMaster)  # Any: a union
        self.unsent = bytearray()
        self.watched = select.EPOLLIN
        self.closed = False

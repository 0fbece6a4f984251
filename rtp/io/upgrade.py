"""HTTP connections that become frame connections, from both ends (see io/handshake)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from rtp.core.errors import ProtocolError
from rtp.io import addresses
from rtp.io.connection import FrameConnection
from rtp.io.handshake import (
    PATHS,
    PROOF_BYTES,
    UPGRADE,
    Claim,
    connection_proof,
    new_nonce,
    read_claim,
    same,
)

ABOUT = "rtp-about"
MAX_HEAD_BYTES = 8192
HANDSHAKE_S = 3.0
PROBE_AFTER_S = 5
PROBE_EVERY_S = 2
DEAD_AFTER_S = 15


def notice_death(sock: socket.socket) -> None:
    """Lets the kernel end a connection whose peer's machine or network is gone with no word: else a
    stream would wait for tokens until its request's deadline, and a worker for its Master until TCP
    gives up, a quarter of an hour later. Peers that are only slow answer the probes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    sock.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (DEAD_AFTER_S - PROBE_AFTER_S) // PROBE_EVERY_S
    )
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)


class Refused(ProtocolError):
    """The other side answered and said no, or nobody listens there."""


# ---------------------------------------------------------------- the side that is dialled


async def accept(
    request: web.Request,
    kind: str,
    secret: bytes,
    admit: Callable[[Claim], str],
    opened: Callable[[Claim], FrameConnection],
    about: str = "",
) -> web.StreamResponse:
    """Turns a request into a frame connection and returns when that has closed.

    admit(claim): why the claim is refused ('' if it is not), asked before the dialler has proved
    anything, and again after.  opened(claim): makes the connection, once proved.  about: what the
    dialler is told of this side, proved with the rest.
    """
    claim = read_claim(kind, {k.lower(): v for k, v in request.headers.items()})
    refusal = admit(claim)
    if refusal:
        return web.Response(status=409, text=refusal)
    nonce = new_nonce()
    proof = connection_proof(secret, "worker", claim, nonce, about).hex()
    said = f"RTP-About: {about}\r\n" if about else ""
    http = request.protocol
    transport = cast(asyncio.Transport, request.transport)
    transport.write(
        f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: {UPGRADE}\r\nConnection: Upgrade\r\n"
        f"{said}RTP-Nonce: {nonce}\r\nRTP-Proof: {proof}\r\n\r\n".encode()
    )
    gate = _Gate(http, connection_proof(secret, "dialler", claim, nonce, about))
    transport.set_protocol(gate)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            proved = await gate.proved
    except TimeoutError:
        proved = False
    refusal = admit(claim) if proved else "not proved"
    if refusal or transport.is_closing():
        transport.abort()
    else:
        notice_death(transport.get_extra_info("socket"))
        connection = opened(claim)
        gate.become(connection)
    try:
        await gate.lost
    except asyncio.CancelledError:
        transport.abort()
        raise
    return web.Response()  # never sent: the transport is gone


class _Gate(asyncio.Protocol):
    """Stands between aiohttp and the frame connection: waits for the dialler's proof, keeps what
    came right behind it, and tells aiohttp of the end, which then forgets the connection."""

    def __init__(self, http: RequestHandler, expected: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.proved: asyncio.Future[bool] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._http = http
        self._expected = expected
        self._received = bytearray()
        self._next: FrameConnection | None = None

    def become(self, connection: FrameConnection) -> None:
        """From now on everything is the connection's; this stays its transport's protocol so that
        both it and aiohttp learn of the end."""
        self._next = connection
        assert self._http.transport is not None
        connection.connection_made(self._http.transport)
        if len(self._received) > PROOF_BYTES:
            connection.data_received(bytes(self._received[PROOF_BYTES:]))

    def data_received(self, data: bytes) -> None:
        if self._next is not None:
            self._next.data_received(data)
            return
        self._received += data
        if not self.proved.done() and len(self._received) >= PROOF_BYTES:
            self.proved.set_result(same(bytes(self._received[:PROOF_BYTES]), self._expected))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.proved.done():
            self.proved.set_result(False)
        if self._next is not None:
            self._next.connection_lost(exc)
        self._http.connection_lost(exc)
        if not self.lost.done():
            self.lost.set_result(None)


# ---------------------------------------------------------------- the dialler's side


def request_head(claim: Claim, address: str) -> bytes:
    """The GET that asks for the upgrade."""
    lines = [f"GET {PATHS[claim.kind]} HTTP/1.1", f"Host: {address}"]
    lines += [f"{name}: {value}" for name, value in claim.headers().items()]
    if any(c in value for value in claim.headers().values() for c in "\r\n"):
        raise ProtocolError("a name with a line break cannot be dialled")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_answer(head: bytes, secret: bytes, claim: Claim) -> bytes:
    """Checks the answer (without the blank line); returns the proof to send. Raises Refused when it
    is no 101, ProtocolError when its proof is wrong."""
    status, headers = _head(head)
    if status.split(" ", 2)[1:2] != ["101"]:
        raise Refused(f"{claim.kind} to {claim.worker_id} refused: {status}")
    nonce, about = headers.get("rtp-nonce", ""), headers.get(ABOUT, "")
    expected = connection_proof(secret, "worker", claim, nonce, about).hex()
    if not same(headers.get("rtp-proof", ""), expected):
        raise ProtocolError(f"{claim.worker_id} does not hold this cluster's secret")
    return connection_proof(secret, "dialler", claim, nonce, about)


def _head(head: bytes) -> tuple[str, dict[str, str]]:
    """Status line, and headers under lower-cased names."""
    first, *lines = head.decode("latin-1").split("\r\n")
    return first, {k.strip().lower(): v.strip() for k, _, v in (x.partition(":") for x in lines)}


async def dial(address: str, claim: Claim, secret: bytes, connection: FrameConnection) -> str:
    """Opens a proved connection; returns what the other side says of itself ("" of a worker).
    Raises Refused, ProtocolError, OSError or TimeoutError; the connection then never opened and its
    on_closed is not called."""
    host, port = addresses.split(address)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANDSHAKE_S):
        try:
            transport, waiting = await loop.create_connection(_Dialling, host, port)
        except ConnectionRefusedError as error:
            raise Refused(f"nobody listens at {address}") from error
        try:
            transport.write(request_head(claim, address))
            head = await waiting.head
            proof = read_answer(head, secret, claim)
        except BaseException:
            transport.abort()
            raise
    transport.write(proof)
    notice_death(transport.get_extra_info("socket"))
    connection.attach(transport)
    if waiting.closed:
        connection.connection_lost(None)
    elif waiting.rest:
        connection.data_received(bytes(waiting.rest))
    return _head(head)[1].get(ABOUT, "")


class _Dialling(asyncio.Protocol):
    """Reads the answer's head; frames right behind it are kept in `rest`."""

    def __init__(self) -> None:
        self.head: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.rest = bytearray()
        self.closed = False

    def data_received(self, data: bytes) -> None:
        self.rest += data
        if self.head.done():
            return
        head, blank, rest = bytes(self.rest).partition(b"\r\n\r\n")
        if blank:
            self.rest = bytearray(rest)
            self.head.set_result(head)
        elif len(self.rest) > MAX_HEAD_BYTES:
            self.head.set_exception(ProtocolError("an endless answer"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self.head.done():
            self.head.set_exception(exc or ConnectionResetError("closed during the handshake"))

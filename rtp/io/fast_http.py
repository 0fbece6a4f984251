"""A few hot routes on a bare protocol, in front of aiohttp and on the same port.

A connection starts here. A request with a plain head (HTTP/1.1, the grammar below, no header twice,
a known length, nothing to negotiate) that names a hot route is answered here; at the first one that
is not, the connection goes over to aiohttp for good, with every byte it has not been
answered for. So what is odd, slow, large or no HTTP at all meets the one parser and the one set of
rules that all other routes have, which must therefore serve the hot routes as well. One request of
a connection is under way at a time; what is pipelined behind it waits, and beyond MOST_AHEAD is not
read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple, cast

from aiohttp.helpers import rfc822_formatted_time

MOST_HEAD = 8190
"""Bytes of a head; aiohttp refuses longer lines."""
MOST_BODY = 128 << 10
"""Larger ones would keep the loop for milliseconds; aiohttp's side hashes in a thread."""
MOST_AHEAD = 64 << 10
KEPT_HEADS = 512
LOOK_S = 60.0
"""A connection that has brought no whole first request by then is closed."""
TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
REQUEST_LINE = re.compile(rb"([A-Z]+) (/[!-~]*) HTTP/1\.1")
HEADER_LINES = re.compile(rb"(?:" + TOKEN + rb":[\t -~\x80-\xff]*\r\n)+")
ELSEWHERE = ("transfer-encoding", "content-encoding", "expect", "upgrade")
"""Headers whose meaning is left to aiohttp."""
JSON_TYPE = "application/json"
STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
    for status in HTTPStatus
}
"""And what follows them in every answer."""

Handler = Callable[["Call"], None]
Find = Callable[[bytes, bytes], Handler | None]
"""(method, target) -> who answers it; None: nobody here."""


class Head(NamedTuple):
    """What the header lines of a request say."""

    headers: Mapping[str, str]
    """Names in lower case; what is no UTF-8 is replaced."""
    length: int
    """Bytes of the body."""
    closes: bool
    """The connection ends with the answer."""


class Call:
    """One request. Answer it once, now or later; on_gone is called if its client left before."""

    __slots__ = ("_connection", "body", "closes", "headers", "on_gone", "target")

    def __init__(self, connection: FastHttp, target: bytes, head: Head, body: bytes) -> None:
        self.target = target
        self.headers, _, self.closes = head
        self.body = body
        self.on_gone: Callable[[], None] = _nothing
        self._connection = connection

    def answer(self, status: int, body: bytes, extra: str = "") -> None:
        """extra: further header lines, each with its CRLF. Nothing happens if the client left."""
        self._connection.answered(self, status, body, extra)


class FastHttp(asyncio.Protocol):
    """One connection. stems: how the request lines of hot routes begin; what cannot become one of
    them goes over at once.  other: makes aiohttp's connection."""

    def __init__(
        self,
        find: Find,
        stems: tuple[bytes, ...],
        other: Callable[[], asyncio.Protocol],
        open_connections: set[FastHttp],
        keepalive_s: float,
    ) -> None:
        self._find = find
        self._stems = stems
        self._other = other
        self._open = open_connections
        self._most_looks = max(1, round(keepalive_s / LOOK_S))
        self._transport: asyncio.Transport = cast(
            asyncio.Transport, None
        )  # connection_made sets it
        self._parts: list[bytes] = []
        self._size = 0
        self._want = 0
        """Bytes without which there is nothing new to see."""
        self._call: Call | None = None
        self._parsing = False
        self._write_blocked = False
        self._read_paused = False
        self._closing = False
        self._num_answered = 0
        self._num_seen = 0
        self._idle_looks = 0

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._open.add(self)
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._open.discard(self)
        call, self._call = self._call, None
        self._closing = True
        if call is not None:
            call.on_gone()

    def data_received(self, data: bytes) -> None:
        free = self._call is None and not self._write_blocked
        if free and not self._size:
            self._parse(data)
            return
        self._parts.append(data)
        self._size += len(data)
        if free:
            if self._size >= self._want:
                self._parse(self._taken())
        elif self._size > MOST_AHEAD and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._write_blocked = True

    def resume_writing(self) -> None:
        self._write_blocked = False
        self._go_on()

    # ------------------------------------------------------------ answers

    def answered(self, call: Call, status: int, body: bytes, extra: str) -> None:
        if call is not self._call:
            return
        self._call = None
        self._num_answered += 1
        if call.closes:
            self._closing = True
            extra += "Connection: close\r\n"
        head = (
            f"{STATUS_LINES[status]}Content-Length: {len(body)}\r\n"
            f"Date: {rfc822_formatted_time()}\r\n{extra}\r\n"
        )
        self._transport.write(head.encode("latin-1") + body)
        if self._closing:
            self._transport.close()
        elif not self._parsing:
            self._go_on()

    def close(self) -> None:
        """Ends the connection; an answer under way is still sent."""
        self._closing = True
        if self._call is None:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # ------------------------------------------------------------ requests

    def _go_on(self) -> None:
        """What waited behind an answer, or behind a client that did not read."""
        if self._parsing or self._call is not None or self._write_blocked or self._closing:
            return
        if self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()
        if self._size:
            self._parse(self._taken())

    def _parse(self, data: bytes) -> None:
        """Takes requests from what has arrived until one is under way or incomplete, and keeps the
        rest."""
        self._parsing = True
        at = 0
        while at < len(data) and self._call is None:
            if self._write_blocked or self._closing:
                break
            used = self._one(data, at)
            if used < 0:
                self._keep(data[at:])
                self._hand_over()
                return
            if not used:
                break
            at += used
        if at < len(data):
            self._keep(data[at:])
        self._parsing = False

    def _one(self, data: bytes, at: int) -> int:
        """Length of the request at `at`, which was begun; 0: not all here yet; -1: not for us."""
        self._want = 0
        end = data.find(b"\r\n\r\n", at)
        if end < 0:
            begun = data[at : at + MOST_HEAD]
            hopeful = any(begun.startswith(s[: len(begun)]) for s in self._stems)
            return 0 if hopeful and len(data) - at <= MOST_HEAD else -1
        line_end = data.find(b"\r\n", at)
        line = REQUEST_LINE.fullmatch(data, at, line_end)
        if line is None or end - at > MOST_HEAD:
            return -1
        method, target = line.groups()
        handler, head = self._find(method, target), _head(data[line_end + 2 : end + 2])
        if handler is None or head is None or head.length > MOST_BODY:
            return -1
        start = end + 4
        stop = start + head.length
        if len(data) < stop:
            self._want = stop - at
            return 0
        call = self._call = Call(self, target, head, data[start:stop])
        handler(call)
        return stop - at

    def _keep(self, rest: bytes) -> None:
        self._parts, self._size = [rest], len(rest)

    def _taken(self) -> bytes:
        """What was kept, and no longer is."""
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._size = [], 0
        return data

    def _hand_over(self) -> None:
        """The connection is aiohttp's from here on."""
        self._timer.cancel()
        self._open.discard(self)
        protocol, transport = self._other(), self._transport
        if self._read_paused:
            transport.resume_reading()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for part in self._parts:
            protocol.data_received(part)

    def _look(self) -> None:
        """Once a minute: closes what brings nothing, hands over what does not get on."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        if self._call is not None or self._write_blocked or self._num_answered != self._num_seen:
            self._num_seen = self._num_answered
            self._idle_looks = 0
        elif self._size:
            self._hand_over()
        else:
            self._idle_looks += 1
            if not self._num_answered or self._idle_looks >= self._most_looks:
                self._transport.close()


@lru_cache(maxsize=KEPT_HEADS)
def _head(lines: bytes) -> Head | None:
    """Header lines, each with its CRLF; None where aiohttp shall look. A client sends the same ones
    again and again, but for the length."""
    if HEADER_LINES.fullmatch(lines) is None:
        return None
    headers: dict[str, str] = {}
    for line in lines.decode("utf-8", "replace").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name = name.lower()
        if name in headers or name in ELSEWHERE:
            return None
        headers[name] = value.strip(" \t")
    length = headers.get("content-length", "0")
    kind = headers.get("content-type", JSON_TYPE)
    counted = length.isascii() and length.isdigit() and len(length) < 10
    if not counted or kind.partition(";")[0].strip() != JSON_TYPE:
        return None
    return Head(headers, int(length), "close" in headers.get("connection", "").lower())


def _nothing() -> None:
    pass

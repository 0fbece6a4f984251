"""Hot routes in front of aiohttp: what they answer, what they leave to it, what odd bytes do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rtp.io import fast_http
from rtp.io.fast_http import Call
from rtp.io.http_server import HotRoutes, make_runner

STEMS = (b"POST /hot",)


class Server:
    """One hot route, which echoes or keeps its calls; aiohttp says "slow" to whatever else."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.keeps = False
        self.gone = 0
        self.runner: Any = None
        self.address: tuple[str, int] = ("", 0)

    def find(self, method: bytes, target: bytes) -> Callable[[Call], None] | None:
        return self.hot if (method, target) == (b"POST", b"/hot") else None

    def hot(self, call: Call) -> None:
        self.calls.append(call)
        call.on_gone = self.left
        if not self.keeps:
            call.answer(200, b"hot:" + call.body)

    def left(self) -> None:
        self.gone += 1

    async def slow(self, request: web.Request) -> web.Response:
        return web.Response(body=b"slow:" + await request.read())

    async def talk(self, *pieces: bytes) -> bytes:
        """All that is answered to these bytes, sent one after the other, until the server ends."""
        reader, writer = await asyncio.open_connection(*self.address)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        return answer

    async def called(self, times: int) -> None:
        await self.until(lambda: len(self.calls) >= times)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():  # noqa: ASYNC110 -- counters have no event
                await asyncio.sleep(0.001)

    def connections(self) -> list[fast_http.FastHttp]:
        """Those that aiohttp does not have."""
        return list(self.runner.server._fast)


@asynccontextmanager
async def a_server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application(client_max_size=1 << 20)
    app.router.add_route("*", "/{path:.*}", server.slow)
    runner = make_runner(app, HotRoutes(server.find, STEMS))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.address = runner.addresses[0][:2]
    server.runner = runner
    yield server
    await runner.cleanup()


def post(body: bytes = b"x", head: str = "", path: str = "/hot", close: bool = False) -> bytes:
    head += "Connection: close\r\n" if close else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: h\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def bodies(answer: bytes) -> list[bytes]:
    """The bodies of answers that follow each other, framing checked."""
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n"), head
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(lines[b"content-length"])
        found.append(rest[:length])
        answer = rest[length:]
    return found


async def test_requests_of_one_connection_are_answered_in_order():
    async with a_server() as server:
        assert bodies(await server.talk(post(b"1"), post(b"2", close=True))) == [b"hot:1", b"hot:2"]


async def test_pipelined_requests_are_answered_one_by_one():
    async with a_server() as server:
        many = b"".join(post(b"%d" % i) for i in range(50)) + post(b"end", close=True)
        answers = bodies(await server.talk(many))
        assert answers == [b"hot:%d" % i for i in range(50)] + [b"hot:end"]


async def test_a_request_may_come_in_any_pieces():
    async with a_server() as server:
        data = post(b"abc", "X: y\r\n") + post(b"def", close=True)
        for cut in range(1, len(data)):
            assert bodies(await server.talk(data[:cut], data[cut:])) == [b"hot:abc", b"hot:def"]


async def test_what_waits_behind_an_answer_is_taken_up_after_it():
    async with a_server() as server:
        server.keeps = True
        talk = asyncio.create_task(server.talk(post(b"1") + post(b"2", close=True)))
        await server.called(1)
        server.calls[0].answer(200, b"first")
        await server.called(2)
        server.calls[1].answer(200, b"second")
        assert bodies(await talk) == [b"first", b"second"]


@pytest.mark.parametrize(
    "sent",
    [
        post(path="/cold", close=True),
        post(path="/hot?query", close=True),
        post(head="Expect: 100-continue\r\n", close=True).replace(b"Expect", b"X-Expect"),
        post(head="Content-Encoding: identity\r\n", close=True),
        post(head="X: 1\r\nX: 2\r\n", close=True),
        post(head="Content-Type: text/plain\r\n", close=True),
        b"POST /hot HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1\r\nx\r\n0\r\n\r\n",
        b"GET /hot HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
    ],
)
async def test_what_is_not_plain_is_aiohttps(sent: bytes):
    hot = b"X-Expect" in sent
    async with a_server() as server:
        (body,) = bodies(await server.talk(sent))
        assert body.startswith(b"hot:" if hot else b"slow:")


async def test_a_connection_goes_over_between_two_requests():
    async with a_server() as server:
        sent = post(b"1") + post(b"2", path="/cold") + post(b"3", close=True)
        assert bodies(await server.talk(sent)) == [b"hot:1", b"slow:2", b"slow:3"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00\xf5garbage\r\n\r\n",
        b"POST /hot HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"POST /hot HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\nx",
        b"POST /hot HTTP/1.1\r\nHost: h\r\nContent-Length: 1\n\r\n\r\nx",
        b"POST /hot HTTP/1.1\r\nHost : h\r\nContent-Length: 1\r\n\r\nx",
        b"POST /hot HTTP/1.1\r\nHost: h\r\nX: a\0b\r\nContent-Length: 1\r\n\r\nx",
        b"POST /hot HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx",
        b"POST /hot" + b"a" * 20000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
)
async def test_garbage_gets_400_and_harms_nobody(sent: bytes):
    async with a_server() as server:
        for data in (sent, post(b"1") + sent):
            answer = await server.talk(data)
            assert b" 400 Bad Request\r\n" in answer
        assert len(server.calls) == 1
        assert bodies(await server.talk(post(b"2", close=True))) == [b"hot:2"]


async def test_a_client_that_leaves_is_told_of_once_and_its_answer_goes_nowhere():
    async with a_server() as server:
        server.keeps = True
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(post())
        await server.called(1)
        writer.transport.abort()
        await server.until(lambda: server.gone == 1)
        server.calls[0].answer(200, b"too late")
        server.keeps = False
        assert bodies(await server.talk(post(b"2", close=True))) == [b"hot:2"]
        assert server.gone == 1


async def test_a_client_that_sends_on_and_on_is_not_read_on_and_on():
    async with a_server() as server:
        server.keeps = True
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(post())
        await server.called(1)
        one = post(b"y" * 1000)
        flood = asyncio.create_task(_flood(writer, one))
        (connection,) = server.connections()
        await server.until(lambda: connection._read_paused)
        held = connection._size
        assert held < fast_http.MOST_AHEAD + (1 << 20)
        server.keeps = False
        server.calls[0].answer(200, b"")
        await server.until(lambda: len(server.calls) > 2000)
        flood.cancel()
        writer.transport.abort()


async def test_a_server_that_stops_closes_idle_connections_and_cuts_the_others():
    async with a_server() as server:
        idle_reader, idle = await asyncio.open_connection(*server.address)
        idle.write(post(b"1"))
        assert (await idle_reader.readuntil(b"hot:1")).startswith(b"HTTP/1.1 200")
        server.keeps = True
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(post(b"2"))
        await server.called(2)
    assert await idle_reader.read() == b""
    assert server.gone == 1
    idle.close()
    writer.close()
    del reader


async def test_who_sends_nothing_is_closed_and_who_drips_is_aiohttps(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(fast_http, "LOOK_S", 0.01)
    async with a_server() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        assert await reader.read() == b""
        writer.close()
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(post(b"1")[:30])
        await server.until(lambda: not server.connections())  # aiohttp's now
        writer.write(post(b"1", close=True)[30:])
        assert bodies(await reader.read()) == [b"slow:1"]
        writer.close()


async def _flood(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()

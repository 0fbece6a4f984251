"""Frontend <-> Master over real sockets: proofs, terms, replacement, floods, garbage, restarts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from aiohttp import web

from rtp.core.commands import Command, Note
from rtp.core.events import Event, From, FrontendDown, FrontendUp, MasterDown, MasterUp
from rtp.core.messages import Ask, Cancel, Grant, Poll, Refuse, WorkerLost
from rtp.core.types import FrontendId, RequestId, WorkerId
from rtp.io.ask_link import ASKS_A_TURN, MAX_FRONTENDS, AskLinks
from rtp.io.codec import FrameDecoder, ToAsker, frame
from rtp.io.connection import FrameConnection
from rtp.io.handshake import Claim, connection_proof, new_nonce
from rtp.io.http_server import make_runner
from rtp.io.master_client import MasterClient
from rtp.io.upgrade import dial, request_head
from tests.support.sockets import SECRET, Recorder

F1, R1, W1 = FrontendId("f1"), RequestId("r1"), WorkerId("w1")
CANCEL = Cancel(R1, 1, "test")
GRANT = Grant(R1, 1, 0, W1, 1, "127.0.0.1:1", 0, 0, 0.25)


def an_ask(number: int = 1, frontend_id: str = "f1", **fields: object) -> Ask:
    ask = Ask(
        frontend_id=FrontendId(frontend_id),
        request_id=RequestId(f"r{number}"),
        attempt=1,
        model="m",
        tenant="",
        chat_id="",
        priority=0,
        hashes=bytes(32),
        num_tokens=40,
        max_tokens=8,
        n=1,
        deadline_s=10.0,
    )
    return msgspec.structs.replace(ask, **fields)


@dataclass
class FakeMaster:
    """A Master's connections to frontends around a Recorder."""

    core: Recorder
    links: AskLinks
    address: str
    notes: list[Note] = field(default_factory=list)


@asynccontextmanager
async def a_master(term: int = 7, port: int = 0) -> AsyncIterator[FakeMaster]:
    core, notes = Recorder(), []

    def on_event(event: Event) -> None:
        core.handle(event, 0.0)

    links = AskLinks(secret=SECRET, term=term, on_event=on_event, on_note=notes.append)
    app = web.Application()
    app.add_routes([links.route()])
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    try:
        yield FakeMaster(core, links, f"127.0.0.1:{runner.addresses[0][1]}", notes)
    finally:
        links.close()
        await runner.cleanup()


@dataclass
class FakeFrontend:
    """A frontend's connection around a Recorder, and the reasons for which it was down."""

    core: Recorder
    client: MasterClient
    troubles: list[str]


@asynccontextmanager
async def a_frontend(
    address: str, frontend_id: str = "f1", secret: bytes = SECRET
) -> AsyncIterator[FakeFrontend]:
    core, troubles = Recorder(), []

    def trouble(reason: str) -> None:
        troubles.append(reason)
        core._news.set()

    client = MasterClient(
        address,
        secret=secret,
        frontend_id=FrontendId(frontend_id),
        on_up=lambda term: core.handle(MasterUp(term), 0.0) and None,
        on_down=lambda: core.handle(MasterDown(), 0.0) and None,
        on_message=lambda message: core.handle(From("master", message), 0.0) and None,
        on_trouble=trouble,
    )
    client.start()
    try:
        yield FakeFrontend(core, client, troubles)
    finally:
        await client.close()


async def test_a_frontend_learns_the_term_asks_and_is_answered_in_order():
    async with a_master(term=7) as master, a_frontend(master.address) as frontend:
        assert await frontend.core.got(MasterUp) == [MasterUp(7)]
        asks = [an_ask(i) for i in range(50)]
        for ask in asks:
            frontend.client.send(ask)
        frontend.client.send(CANCEL)
        got = await master.core.got(FrontendUp, From, count=52)
        assert got == [FrontendUp(F1), *(From("f1", m) for m in [*asks, CANCEL])]
        answers = [GRANT, Refuse(R1, 1, 429, "c", "r", 1.0), WorkerLost(W1, 1)]
        assert all(master.links.send("f1", answer) for answer in answers)
        assert [e.message for e in await frontend.core.got(From, count=3)] == answers
        assert not master.links.send("f2", GRANT)


class Counting:
    """A transport whose writes are counted."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport, self.sizes = transport, []

    def write(self, data: bytes) -> None:
        self.sizes.append(len(data))
        self.transport.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self.transport, name)


async def test_all_answers_of_a_turn_leave_in_one_write():
    async with a_master() as master, a_frontend(master.address) as frontend:
        await master.core.got(FrontendUp)
        link = master.links._links["f1"]
        counting = link._transport = Counting(link._transport)
        for turn in range(2):
            for _ in range(20):
                master.links.send("f1", GRANT)
            await frontend.core.got(From, count=20 * (turn + 1))
        assert counting.sizes == [20 * len(frame(GRANT))] * 2


async def test_what_leaves_or_is_asked_while_down_is_told_as_events_only():
    async with a_master() as master:
        async with a_frontend(master.address) as frontend:
            await frontend.core.got(MasterUp)
        assert await master.core.got(FrontendDown) == [FrontendDown(F1)]
        assert MasterDown() not in frontend.core.events  # it ended by itself
        frontend.client.send(CANCEL)
        assert len(master.links) == 0
        assert [note.event for note in master.notes] == ["frontend.joined", "frontend.left"]


async def test_a_wrong_secret_is_refused_by_the_frontend():
    async with a_master() as master, a_frontend(master.address, secret=b"x" * 32) as frontend:
        await frontend.core.until(lambda: bool(frontend.troubles))
        assert "secret" in frontend.troubles[0]
        assert not frontend.client.connected
        assert master.core.events == []


async def test_a_frontend_that_cannot_prove_itself_is_none():
    async with a_master() as master:
        host, port = master.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_head(Claim("ask", "master", 0, "f1", new_nonce()), "x"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"RTP-About: 7\r\n" in head
        writer.write(bytes(32) + frame(an_ask()))
        assert await reader.read() == b""
        assert master.core.events == []


async def test_a_term_that_somebody_changed_on_the_way_is_not_believed():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        nonce = dict(line.split(": ", 1) for line in lines[1:-2])["RTP-Nonce"]
        claim = Claim("ask", "master", 0, "f1", nonce)
        proof = connection_proof(SECRET, "worker", claim, "n", "7").hex()
        head = f"HTTP/1.1 101 X\r\nRTP-About: 8\r\nRTP-Nonce: n\r\nRTP-Proof: {proof}\r\n\r\n"
        writer.write(head.encode())
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with a_frontend(f"127.0.0.1:{port}") as frontend:
            await frontend.core.until(lambda: bool(frontend.troubles))
            assert "secret" in frontend.troubles[0]
            assert frontend.core.events == []


async def test_a_frontend_outlives_masters_but_takes_none_of_a_lower_term():
    async with AsyncExitStack() as stack:
        async with a_master(term=7) as first:
            port = int(first.address.rpartition(":")[2])
            frontend = await stack.enter_async_context(a_frontend(first.address))
            await frontend.core.got(MasterUp)
        await frontend.core.got(MasterDown)
        async with a_master(term=6, port=port) as older:
            await frontend.core.until(lambda: any("409" in reason for reason in frontend.troubles))
            assert older.core.events == []
        async with a_master(term=8, port=port) as later:
            got = await frontend.core.got(MasterUp, MasterDown, count=3)
            assert got == [MasterUp(7), MasterDown(), MasterUp(8)]
            frontend.client.send(CANCEL)
            assert await later.core.got(From) == [From("f1", CANCEL)]


async def test_the_same_frontend_again_takes_the_place_of_its_earlier_connection():
    async with a_master() as master, a_frontend(master.address) as one:
        await master.core.got(FrontendUp)
        async with a_frontend(master.address) as other:
            got = await master.core.got(FrontendUp, FrontendDown, count=3)
            assert got == [FrontendUp(F1), FrontendDown(F1), FrontendUp(F1)]
            await one.core.got(MasterDown)
            await one.client.close()
            await other.core.got(MasterUp)
            assert master.links.send("f1", GRANT)
            assert await other.core.got(From) == [From("master", GRANT)]
            assert len(master.links) == 1


async def test_frontends_are_told_apart_and_bounded_in_number():
    async with a_master() as master:
        lost: list[str] = []
        connections = []
        for i in range(MAX_FRONTENDS):
            connection = FrameConnection(FrameDecoder(ToAsker), lambda message: None, lost.append)
            claim = Claim("ask", "master", 0, f"f{i}", new_nonce())
            assert await dial(master.address, claim, SECRET, connection) == "7"
            connections.append(connection)
        async with a_frontend(master.address, "one too many") as frontend:
            await frontend.core.until(lambda: bool(frontend.troubles))
            assert "409" in frontend.troubles[0]
        connections[3].send(an_ask(3, "f3"))
        connections[5].send(an_ask(5, "f5"))
        got = await master.core.got(From, count=2)
        assert {e.peer: e.message.request_id for e in got} == {"f3": "r3", "f5": "r5"}
        assert not lost
        for connection in connections:
            connection.close()
        await master.core.got(FrontendDown, count=MAX_FRONTENDS)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x01\xc1",
        frame(Poll(1, 0.02, 0.05, -1, -1)),
        frame(an_ask(frontend_id="f2")),
        frame(an_ask(hashes=bytes(15))),
        frame(an_ask(n=0)),
        frame(an_ask(num_tokens=0)),
        frame(an_ask(max_tokens=-1)),
        frame(an_ask(deadline_s=float("nan"))),
        frame(an_ask(ttft_timeout_s=float("nan"))),
    ],
)
async def test_garbage_ends_its_connection_and_no_other(garbage: bytes):
    async with a_master() as master, a_frontend(master.address, "f9") as neighbour:
        lost: list[str] = []
        connection = FrameConnection(FrameDecoder(ToAsker), lambda message: None, lost.append)
        await dial(master.address, Claim("ask", "master", 0, "f1", new_nonce()), SECRET, connection)
        connection.send(an_ask())
        assert await master.core.got(From) == [From("f1", an_ask())]
        connection._transport.write(garbage + frame(an_ask(2)))
        assert await master.core.got(FrontendDown) == [FrontendDown(F1)]
        assert "protocol error" in str(master.notes[-1].fields["reason"])
        neighbour.client.send(CANCEL)
        assert (await master.core.got(From, count=2))[1] == From("f9", CANCEL)


async def test_a_flood_is_taken_a_few_a_turn_and_does_not_hold_up_others():
    async with a_master() as master:
        turn, by_turn = 0, Counter[int]()
        loop = asyncio.get_running_loop()

        def next_turn() -> None:
            nonlocal turn
            turn += 1
            beat[0] = loop.call_soon(next_turn)

        def count(event: Event) -> list[Command]:
            by_turn[turn] += isinstance(event, From)
            return []

        master.core.answer = count
        beat = [loop.call_soon(next_turn)]
        async with a_frontend(master.address) as greedy, a_frontend(master.address, "f2") as other:
            await greedy.core.got(MasterUp)
            await other.core.got(MasterUp)
            for i in range(2000):
                greedy.client.send(an_ask(i))
            await master.core.got(From)
            other.client.send(CANCEL)
            await master.core.until(lambda: From("f2", CANCEL) in master.core.events)
            before = sum(isinstance(e, From) for e in master.core.events)
            await master.core.got(From, count=2001)
            beat[0].cancel()
            assert before < 1000  # it did not wait until the others were through
            assert max(by_turn.values()) <= ASKS_A_TURN
            got = [e.message for e in master.core.events if isinstance(e, From) and e.peer == "f1"]
            assert got == [an_ask(i) for i in range(2000)]

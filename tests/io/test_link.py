"""Master <-> worker over real sockets: handshake, frames both ways, losses, drained links."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from rtp.core.commands import Command
from rtp.core.errors import ProtocolError
from rtp.core.events import From, LinkDown, LinkUp, MasterDown, MasterUp
from rtp.core.messages import STATUS_COLUMNS, Delta, Fence, KeyChange, Poll, Status
from rtp.core.types import RequestId, WorkerId
from rtp.io import worker_link
from rtp.io.codec import FrameDecoder, ToMaster, frame
from rtp.io.connection import FrameConnection
from rtp.io.handshake import Claim, connection_proof, new_nonce
from rtp.io.upgrade import Refused, dial, request_head
from rtp.io.worker_link import Links
from tests.support.sockets import SECRET, FakeWorker, Recorder, a_worker, closing

W1 = WorkerId("w1")
POLL = Poll(1, 0.02, 0.05, -1, -1)


def links(term: int = 1, secret: bytes = SECRET) -> tuple[Recorder, Links]:
    core = Recorder()
    made = Links(
        secret=secret,
        term=term,
        on_event=lambda event: core.handle(event, 0.0),
        on_closed=lambda worker_id, reason: core.closed.append(reason),
    )
    return core, made


def status(worker: FakeWorker, seq: int) -> Status:
    table = np.full((1, len(STATUS_COLUMNS)), seq, dtype="<i8").tobytes()
    return Status(worker.register.worker_id, worker.register.epoch, 1, seq, table)


async def link_to(worker: FakeWorker, made: Links, core: Recorder) -> None:
    """The Master's side is up before the worker has checked its proof: waits for both."""
    made.dial(worker.register.worker_id, worker.register.epoch, worker.register.address)
    await core.got(LinkUp)
    await worker.core.got(MasterUp)


async def test_frames_go_both_ways_in_order():
    core, made = links()
    async with a_worker() as worker:
        with closing(made):
            await link_to(worker, made, core)
            assert await worker.core.got(MasterUp) == [MasterUp(1)]
            sent = [POLL, Fence(RequestId("r"), 1, 0, 4)]
            for message in sent:
                made.send(W1, message)
            got = await worker.core.got(From, count=2)
            assert got == [From("master", m) for m in sent]
            back = [status(worker, i) for i in range(50)]
            for message in back:
                worker.loop._link.send(message)
            assert [e.message for e in await core.got(From, count=50)] == back


async def test_frames_larger_than_any_buffer():
    core, made = links()
    async with a_worker() as worker:
        with closing(made):
            await link_to(worker, made, core)
            big = Delta(W1, 1, 0, 1, (KeyChange(0, 0, bytes(8 << 20), b""),))
            worker.loop._link.send(big)
            worker.loop._link.send(status(worker, 1))
            got = await core.got(From, count=2)
            assert [e.message for e in got] == [big, status(worker, 1)]


async def test_what_the_master_sends_right_behind_its_proof_arrives():
    """Proof and frames in one segment: the worker's server must keep what follows the proof."""
    async with a_worker() as worker:
        host, port = worker.register.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        claim = Claim("link", "w1", 1, "1", new_nonce())
        writer.write(request_head(claim, worker.register.address))
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        nonce = next(x for x in head.split("\r\n") if x.startswith("RTP-Nonce")).split(": ")[1]
        proof = connection_proof(SECRET, "dialler", claim, nonce)
        writer.write(proof + frame(POLL) + frame(POLL))
        assert await worker.core.got(From, count=2) == [From("master", POLL)] * 2
        writer.close()
        await worker.core.got(MasterDown)


async def test_what_a_worker_sends_right_behind_the_101_arrives():
    """The dialler's side: head, and a frame, in one segment."""
    core, made = links()
    sent = Status(W1, 1, 1, 0, bytes(8 * len(STATUS_COLUMNS)))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(x.split(": ", 1) for x in head.split("\r\n")[1:-2])
        claim = Claim("link", "w1", 1, "1", headers["RTP-Nonce"])
        proof = connection_proof(SECRET, "worker", claim, "n").hex()
        writer.write(
            f"HTTP/1.1 101 X\r\nRTP-Nonce: n\r\nRTP-Proof: {proof}\r\n\r\n".encode() + frame(sent)
        )
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with closing(made):
            made.dial(W1, 1, f"127.0.0.1:{port}")
            assert await core.got(From) == [From(W1, sent)]


async def test_a_wrong_secret_is_refused_on_both_sides():
    core, made = links(secret=b"x" * 32)
    async with a_worker() as worker:
        with closing(made):
            made.dial(W1, 1, worker.register.address)
            assert await core.got(LinkDown) == [LinkDown(W1, 1)]
            assert "secret" in core.closed[0]
        assert worker.core.events == []


async def test_a_master_that_cannot_prove_itself_gets_no_link():
    async with a_worker() as worker:
        host, port = worker.register.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_head(Claim("link", "w1", 1, "99", new_nonce()), "x"))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(bytes(32))
        assert await reader.read() == b""
        assert worker.core.events == []
        core, made = links(term=1)
        with closing(made):  # and its term counted for nothing
            await link_to(worker, made, core)


async def test_a_lower_term_is_refused_and_a_higher_one_takes_over():
    old, old_links = links(term=1)
    new, new_links = links(term=2)
    async with a_worker() as worker:
        with closing(old_links, new_links):
            await link_to(worker, old_links, old)
            await link_to(worker, new_links, new)
            await old.got(LinkDown)
            assert await worker.core.got(MasterUp, MasterDown, count=3) == [
                MasterUp(1),
                MasterDown(),
                MasterUp(2),
            ]
            old.events.clear()
            old_links.dial(W1, 1, worker.register.address)
            assert await old.got(LinkDown) == [LinkDown(W1, 1, refused=True)]
            assert "409" in old.closed[-1]
            assert worker.loop.linked.is_set()


async def test_another_epoch_or_worker_is_refused():
    core, made = links()
    async with a_worker() as worker:
        with closing(made):
            made.dial(W1, 2, worker.register.address)
            await core.got(LinkDown)
            made.dial(WorkerId("w2"), 1, worker.register.address)
            assert await core.got(LinkDown, count=2) == [
                LinkDown(W1, 2, refused=True),
                LinkDown(WorkerId("w2"), 1, refused=True),
            ]


async def test_nobody_listening_is_refused():
    core, made = links()
    with closing(made):
        made.dial(W1, 1, "127.0.0.1:1")
        assert await core.got(LinkDown) == [LinkDown(W1, 1, refused=True)]


async def test_a_worker_restarted_on_its_port_is_dialled_again():
    core, made = links()
    with closing(made):
        async with a_worker(epoch=1) as worker:
            port = int(worker.register.address.rpartition(":")[2])
            await link_to(worker, made, core)
        assert await core.got(LinkDown) == [LinkDown(W1, 1)]
        core.events.clear()
        async with a_worker(epoch=2, port=port) as worker:
            await link_to(worker, made, core)
            assert core.events == [LinkUp(W1, 2)]


async def test_hanging_up_says_nothing_and_the_worker_learns_of_it():
    core, made = links()
    async with a_worker() as worker:
        with closing(made):
            await link_to(worker, made, core)
            assert not made.hang_up(W1, 9)
            assert made.hang_up(W1, 1)
            await worker.core.got(MasterDown)
            assert core.events == [LinkUp(W1, 1)]
            await link_to(worker, made, core)


async def test_garbage_closes_that_link_only():
    core, made = links()
    async with a_worker("w1") as bad, a_worker("w2") as good:
        with closing(made):
            await link_to(bad, made, core)
            await link_to(good, made, core)
            await core.got(LinkUp, count=2)
            bad.loop._link._transport.write(b"\0\0\0\4junk")
            assert await core.got(LinkDown) == [LinkDown(W1, 1)]
            assert "protocol error" in core.closed[0]
            good.loop._link.send(status(good, 1))
            await core.got(From)
            made.send(W1, POLL)
            made._links[WorkerId("w2")].sock.send(b"\xff\xff\xff\xff")
            await good.core.got(MasterDown)


async def test_a_message_in_anothers_name_costs_the_link():
    core, made = links()
    async with a_worker() as worker:
        with closing(made):
            await link_to(worker, made, core)
            worker.loop._link.send(Status(WorkerId("w2"), 1, 1, 0, bytes(8 * len(STATUS_COLUMNS))))
            await core.got(LinkDown)


async def test_many_links_are_drained_by_a_timer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_link, "EAGER_LINKS", 2)
    monkeypatch.setattr(worker_link, "SOCKETS_A_TURN", 2)
    core, made = links()
    async with (
        a_worker("w1") as a,
        a_worker("w2") as b,
        a_worker("w3") as c,
        a_worker("w4") as d,
    ):
        workers = [a, b, c, d]
        with closing(made):
            for worker in workers:
                await link_to(worker, made, core)
            await core.got(LinkUp, count=4)
            assert not made._eager
            for worker in workers:
                worker.loop._link.send(status(worker, 1))
            got = await core.got(From, count=4)
            assert {e.peer for e in got} == {"w1", "w2", "w3", "w4"}
            made.hang_up(WorkerId("w3"), 1)
            made.hang_up(WorkerId("w4"), 1)
            assert made._eager
            a.loop._link.send(status(a, 2))
            await core.got(From, count=5)


async def test_a_worker_that_sends_much_at_once_is_read_in_turns(monkeypatch: pytest.MonkeyPatch):
    """What a worker tells when it comes back must not stop the Master for as long as it takes."""
    monkeypatch.setattr(worker_link, "BYTES_A_TURN", 1000)
    core, made = links()
    loop, turns, taken = asyncio.get_running_loop(), 0, Counter[int]()

    def next_turn() -> None:
        nonlocal turns
        turns += 1
        if not made._closed:
            loop.call_soon(next_turn)

    def take(event: object) -> list[Command]:
        taken[turns] += isinstance(event, From)
        return []

    async with a_worker() as worker:
        with closing(made):
            await link_to(worker, made, core)
            core.answer = take
            next_turn()
            size = len(frame(status(worker, 0)))
            for i in range(200):
                worker.loop._link.send(status(worker, i))
            got = await core.got(From, count=200)
            assert [event.message.seq for event in got] == list(range(200))
            assert max(taken.values()) <= 1000 // size + 1


async def test_a_worker_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_link, "MAX_UNSENT_BYTES", 1 << 20)
    core, made = links()
    async with a_worker() as worker:
        with closing(made):
            await link_to(worker, made, core)
            await worker.core.got(MasterUp)
            worker.loop._link._transport.pause_reading()
            fence = Fence(RequestId("r" * 60_000), 1, 0, 0)
            while not any(isinstance(e, LinkDown) for e in core.events):
                made.send(W1, fence)
                await asyncio.sleep(0)
            assert "unread" in core.closed[0]


async def test_a_slow_master_is_cut_by_the_worker():
    """A FrameConnection bounds what it keeps for a peer that does not read."""
    async with a_worker() as worker:
        closed: list[str] = []
        connection = FrameConnection(FrameDecoder(ToMaster), lambda m: None, closed.append)
        await dial(
            worker.register.address, Claim("link", "w1", 1, "1", new_nonce()), SECRET, connection
        )
        await worker.core.got(MasterUp)
        connection._transport.pause_reading()
        link = worker.loop._link
        link._max_unsent = 1 << 20
        message = Delta(W1, 1, 0, 1, ())
        while not link.closed:
            for _ in range(1000):
                link.send(message)
            await asyncio.sleep(0)
        note = next(n for n in worker.notes if n.event == "link.closed")
        assert "unread" in str(note.fields["reason"])
        connection.abort("done")


async def test_dial_says_what_went_wrong():
    async with a_worker() as worker:
        connection = FrameConnection(FrameDecoder(ToMaster), lambda m: None, lambda r: None)
        claim = Claim("link", "w1", 1, "1", new_nonce())
        with pytest.raises(Refused, match="listens"):
            await dial("127.0.0.1:1", claim, SECRET, connection)
        with pytest.raises(ProtocolError, match="secret"):
            await dial(worker.register.address, claim, b"y" * 32, connection)

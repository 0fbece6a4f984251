"""Frontend <-> worker over real sockets, and requests as HTTP sees them."""

from __future__ import annotations

import asyncio
import socket

from rtp.core.commands import Chunk, Connect, Deliver, Ended, Failed, Note, Send
from rtp.core.events import (
    Begin,
    ClientGone,
    ClientPaused,
    ClientReady,
    Event,
    From,
    FrontendDown,
    FrontendUp,
    StreamDown,
    StreamUp,
)
from rtp.core.messages import Ack, AckItem, Cancel, Rejected, TokenRun, Tokens
from rtp.core.types import FrontendId, RequestId, SamplingParams, WorkerId
from rtp.io.frontend_loop import PAUSE_BYTES, FrontendLoop
from rtp.io.worker_stream import Streams
from tests.support.sockets import SECRET, Recorder, a_worker, closing

W1, F1, R1 = WorkerId("w1"), FrontendId("f1"), RequestId("r1")
CANCEL = Cancel(R1, 1, "test")


def streams(frontend_id: str = "f1") -> tuple[Recorder, Streams]:
    core = Recorder()
    made = Streams(
        secret=SECRET,
        frontend_id=FrontendId(frontend_id),
        on_event=lambda event: core.handle(event, 0.0),
        on_closed=lambda worker_id, reason: core.closed.append(reason),
    )
    return core, made


async def test_what_is_sent_before_the_stream_is_open_waits_in_order():
    core, made = streams()
    async with a_worker() as worker:
        with closing(made):
            made.connect(W1, 1, worker.register.address)
            sent = [CANCEL, Ack((AckItem(R1, 1, 0, 4),)), CANCEL]
            for message in sent:
                made.send(W1, message)
            got = await worker.core.got(FrontendUp, From, count=4)
            assert got == [FrontendUp(F1), *(From("f1", m) for m in sent)]
            assert await core.got(StreamUp) == [StreamUp(W1, 1)]


async def test_tokens_come_back_in_order():
    core, made = streams()
    async with a_worker() as worker:
        with closing(made):
            made.connect(W1, 1, worker.register.address)
            await worker.core.got(FrontendUp)
            runs = [Tokens((TokenRun(R1, 1, 0, i, (i,)),)) for i in range(200)]
            for message in [*runs, Rejected(R1, 1, "draining", True)]:
                worker.loop._streams[F1].send(message)
            got = await core.got(From, count=201)
            assert [e.message for e in got[:200]] == runs


async def test_frontends_are_told_apart():
    one, first = streams("f1")
    two, second = streams("f2")
    async with a_worker() as worker:
        with closing(first, second):
            for made in (first, second):
                made.connect(W1, 1, worker.register.address)
            await worker.core.got(FrontendUp, count=2)
            second.send(W1, CANCEL)
            assert await worker.core.got(From) == [From("f2", CANCEL)]
            worker.loop._streams[FrontendId("f2")].send(Tokens(()))
            await two.got(From)
            assert not any(isinstance(e, From) for e in one.events)


async def test_a_worker_that_dies_takes_its_stream_down_once():
    core, made = streams()
    with closing(made):
        async with a_worker() as worker:
            made.connect(W1, 1, worker.register.address)
            await core.got(StreamUp)
            await worker.core.got(FrontendUp)
        assert await core.got(StreamDown) == [StreamDown(W1)]
        made.connect(W1, 1, worker.register.address)
        assert (await core.got(StreamDown, count=2))[1] == StreamDown(W1, refused=True)


async def test_a_frontend_that_goes_is_noticed():
    core, made = streams()
    async with a_worker() as worker:
        made.connect(W1, 1, worker.register.address)
        await worker.core.got(FrontendUp)
        made.close()
        assert await worker.core.got(FrontendDown) == [FrontendDown(F1)]
        assert core.events in ([], [StreamUp(W1, 1)])


async def test_a_later_life_takes_the_place_of_an_earlier_one():
    core, made = streams()
    async with a_worker(epoch=1) as old, a_worker(epoch=2) as new:
        with closing(made):
            made.connect(W1, 1, old.register.address)
            await old.core.got(FrontendUp)
            await core.got(StreamUp)
            made.connect(W1, 2, new.register.address)
            await old.core.got(FrontendDown)
            assert await core.got(StreamUp, count=2) == [StreamUp(W1, 1), StreamUp(W1, 2)]
            made.connect(W1, 3, new.register.address)
            assert await core.got(StreamDown) == [StreamDown(W1, refused=True)]


async def test_a_reconnecting_frontend_replaces_its_stream():
    """The worker may learn of the new stream before it notices that the old one is dead."""
    _, first = streams("f1")
    again, second = streams("f1")
    async with a_worker() as worker:
        with closing(first, second):
            first.connect(W1, 1, worker.register.address)
            await worker.core.got(FrontendUp)
            second.connect(W1, 1, worker.register.address)
            got = await worker.core.got(FrontendUp, FrontendDown, count=3)
            assert got == [FrontendUp(F1), FrontendDown(F1), FrontendUp(F1)]
            second.send(W1, CANCEL)
            await worker.core.got(From)
            assert again.events == [StreamUp(W1, 1)]


# ---------------------------------------------------------------- FrontendLoop and Handle


def begin(request_id: str = "r1") -> Begin:
    return Begin(
        request_id=RequestId(request_id),
        model="m",
        prompt=b"\1\0\0\0",
        hashes=b"",
        namespace=b"",
        sampling=SamplingParams(max_tokens=4),
    )


def deliver(text: str) -> Deliver:
    return Deliver(R1, (Chunk(0, text),), 0, 1)


ENDED = Ended(R1, 1, 0, 4)


def frontend(core: Recorder) -> tuple[FrontendLoop, list[object], list[Note]]:
    asked: list[object] = []
    notes: list[Note] = []
    loop = FrontendLoop(
        core, frontend_id=F1, secret=SECRET, to_master=asked.append, on_note=notes.append
    )
    return loop, asked, notes


async def test_a_request_ends_with_one_last_word():
    core = Recorder(lambda e: [deliver("a"), deliver("b"), ENDED] if isinstance(e, Begin) else [])
    loop, _, _ = frontend(core)
    with closing(loop):
        handle = loop.begin(begin())
        assert [c async for c in handle] == [deliver("a"), deliver("b"), ENDED]
        assert loop.open_requests == 0
        handle.cancel()
        assert core.events == [begin()]


async def test_a_request_that_fails_says_so():
    failed = Failed(R1, 503, "server_error", "service_unavailable", "no worker")
    core = Recorder(lambda e: [failed] if isinstance(e, Begin) else [])
    loop, _, _ = frontend(core)
    with closing(loop):
        assert [c async for c in loop.begin(begin())] == [failed]


async def test_cancelling_ends_the_iteration_and_tells_the_core():
    core = Recorder()
    loop, _, _ = frontend(core)
    with closing(loop):
        handle = loop.begin(begin())
        reading = asyncio.create_task(anext(handle, None))
        await asyncio.sleep(0)
        handle.cancel()
        assert await reading is None
        assert core.events == [begin(), ClientGone(R1)]
        assert loop.open_requests == 0


async def test_a_client_that_does_not_fetch_is_paused_and_resumed():
    """Design section 5: the worker is told to wait at 256 KB, not at each chunk."""
    piece = "x" * 1024

    def answer(event: Event) -> list[Deliver]:
        return [deliver(piece)] if isinstance(event, From) else []

    core = Recorder(answer)
    loop, _, _ = frontend(core)
    with closing(loop):
        handle = loop.begin(begin())
        for _ in range(PAUSE_BYTES // 1024):
            loop.from_master(CANCEL)
        assert not any(isinstance(e, ClientPaused) for e in core.events)
        loop.from_master(CANCEL)
        assert core.events[-1] == ClientPaused(R1)
        loop.from_master(CANCEL)
        for _ in range(PAUSE_BYTES // 2048 + 1):
            await anext(handle)
        assert core.events[-1] != ClientReady(R1)
        await anext(handle)
        assert core.events[-1] == ClientReady(R1)


async def test_commands_go_where_they_belong():
    note = Note("request.placed", {})

    async with a_worker() as worker:
        connect = Connect(W1, 1, worker.register.address)
        out = [Send("master", CANCEL), connect, Send("w1", CANCEL), note]
        core = Recorder(lambda e: out if isinstance(e, Begin) else [])
        loop, asked, notes = frontend(core)
        with closing(loop):
            loop.begin(begin())
            assert asked == [CANCEL]
            assert notes == [note]
            assert await worker.core.got(From) == [From("f1", CANCEL)]
            await core.got(StreamUp)


async def test_a_peer_whose_network_is_gone_is_noticed_by_both_ends():
    """No packet can be lost on loopback, so what the kernel was told is looked at."""
    core, made = streams()
    async with a_worker() as worker:
        with closing(made):
            made.connect(W1, 1, worker.register.address)
            await core.got(StreamUp)
            await worker.core.got(FrontendUp)
            for connection in (made._streams[W1].connection, worker.loop._streams[F1]):
                sock = connection._transport.get_extra_info("socket")
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                idle = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
                every = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
                count = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
                assert idle + every * count <= 15
                unread_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert unread_ms == 15_000

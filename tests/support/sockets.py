"""Cores that only record, and a worker's HTTP side without a model, for tests of the io drivers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from rtp.core.card import ModelCard
from rtp.core.commands import Command, Note
from rtp.core.events import Event, Tick
from rtp.core.messages import Register
from rtp.core.types import Role, WorkerId
from rtp.io.handshake import key_id
from rtp.io.http_server import Runner
from rtp.io.worker_http import make_worker_app
from rtp.io.worker_loop import WorkerLoop

SECRET = b"the secret of the tests, 32 bytes and more"
CARD = ModelCard(
    model="m",
    revision="r",
    tokenizer_json="{}",
    chat_template=None,
    bos_token=None,
    eos_token=None,
    pad_token=None,
    eos_ids=(2,),
    add_bos=False,
    vocab_size=100,
    max_model_len=64,
    block_size=16,
    created=0,
)


def a_register(worker_id: str = "w1", epoch: int = 1, **fields: Any) -> Register:
    register = Register(
        worker_id=WorkerId(worker_id),
        epoch=epoch,
        address="127.0.0.1:1",
        role=Role.FUSION,
        ranks=1,
        kv_total=(64,),
        block_size=16,
        model=CARD.model,
        max_model_len=64,
        card=CARD.digest(),
        kv_format="k",
        key_id=key_id(SECRET),
        max_batch_tokens=64,
    )
    return msgspec.structs.replace(register, **fields)


class Recorder:
    """A core that remembers its events; commands are what `answer` makes of an event."""

    def __init__(self, answer: Callable[[Event], list[Command]] = lambda event: []) -> None:
        self.events: list[Event] = []
        self.ticks = 0
        self.deadline: float | None = None
        self.drained = False
        self.answer = answer
        self.closed: list[str] = []
        """Reasons for connections that closed."""
        self._news = asyncio.Event()

    def handle(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, Tick):
            self.ticks += 1
        else:
            self.events.append(event)
        self._news.set()
        return self.answer(event)

    def next_deadline(self) -> float | None:
        return self.deadline

    def overview(self) -> dict[str, Any]:
        return {"cache_version": 0, "ranks": [{"cached_blocks": 0}]}

    async def until(self, true: Callable[[], bool]) -> None:
        """Waits for events until `true()`; fails after ten seconds."""
        async with asyncio.timeout(10):
            while not true():
                self._news.clear()
                await self._news.wait()

    async def got(self, *kinds: type[Event], count: int = 1) -> list[Any]:
        """The first `count` events of these kinds, once there are so many."""
        found: list[Any] = []

        def enough() -> bool:
            found[:] = [e for e in self.events if isinstance(e, kinds)][:count]
            return len(found) == count

        await self.until(enough)
        return found


@dataclass
class FakeWorker:
    """The io of a worker around a Recorder."""

    core: Recorder
    loop: WorkerLoop
    register: Register
    notes: list[Note] = field(default_factory=list)


@asynccontextmanager
async def a_worker(
    worker_id: str = "w1", epoch: int = 1, port: int = 0, secret: bytes = SECRET, **fields: Any
) -> AsyncIterator[FakeWorker]:
    core, notes = Recorder(), []
    register = a_register(worker_id, epoch, **fields)
    loop = WorkerLoop(core, register, [], notes.append, lambda reason: None)
    runner = Runner(make_worker_app(loop, CARD, secret))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    loop.register = msgspec.structs.replace(register, address=address)
    try:
        yield FakeWorker(core, loop, loop.register, notes)
    finally:
        await loop.close()
        await runner.cleanup()


@contextmanager
def closing(*things: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for thing in things:
            thing.close()

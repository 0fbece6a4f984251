"""A proxy in front of one worker that mistreats streams: late, in pieces, cut or closed mid-frame.

    proxy = await Proxy(Random(1)).start()        # the worker advertises proxy.address
    proxy.target = port of the worker

Everything else that passes, links and plain HTTP, passes unharmed, unless `links` is set. Between
partition() and heal() nothing passes either way; what was sent meanwhile arrives late.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from random import Random

READ_BYTES = 4096
LATE_S = 0.03


class Proxy:
    """trouble: the share of chunks that bring a fault."""

    def __init__(self, random: Random, trouble: float = 0.02, links: bool = False) -> None:
        self.target = 0
        self.address = ""
        self.trouble = trouble
        self.counts: Counter[str] = Counter()
        """Faults by kind."""
        self._random = random
        self._kinds = (b"GET /stream", b"GET /link") if links else (b"GET /stream",)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._whole = asyncio.Event()
        self._whole.set()

    def partition(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def close(self) -> None:
        assert self._server is not None
        self.heal()
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, down: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self._open.add(back)
        up = None
        try:
            head = await down.readuntil(b"\r\n\r\n")
            await self._whole.wait()
            answer, up = await asyncio.open_connection("127.0.0.1", self.target)
            self._open.add(up)
            up.write(head)
            evil = head.startswith(self._kinds)
            await asyncio.gather(
                self._carry(down, up, back, evil), self._carry(answer, back, up, evil)
            )
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for writer in (back, up):
                if writer is not None:
                    writer.transport.abort()
                    self._open.discard(writer)

    async def _carry(
        self,
        source: asyncio.StreamReader,
        to: asyncio.StreamWriter,
        back: asyncio.StreamWriter,
        evil: bool,
    ) -> None:
        """One direction of a connection; `back` leads to where the bytes come from."""
        # uvloop says RuntimeError of a transport that is closed.
        with contextlib.suppress(OSError, RuntimeError):
            while data := await source.read(READ_BYTES):
                await self._whole.wait()
                fault = ""
                if evil and self._random.random() < self.trouble:
                    fault = self._random.choice(["late", "pieces", "cut", "closed", "half"])
                    self.counts[fault] += 1
                if fault == "late":
                    await asyncio.sleep(self._random.uniform(0, LATE_S))
                elif fault:
                    split = self._random.randrange(len(data))
                    to.write(data[:split])
                    await to.drain()
                    data = data[split:]
                    await asyncio.sleep(LATE_S)
                    if fault == "cut":
                        to.transport.abort()
                        back.transport.abort()
                    elif fault == "closed":
                        to.close()
                    elif fault == "half":
                        to.write_eof()  # the other direction goes on
                    if fault != "pieces":
                        return
                to.write(data)
                await to.drain()
            to.write_eof()

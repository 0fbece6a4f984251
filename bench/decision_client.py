"""A closed-loop HTTP client that costs little: kept connections, requests made beforehand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast


@dataclass(frozen=True, slots=True)
class Step:
    """One decision: a request for a place, and what gives the place back, made of its answer."""

    place: bytes
    settle: Callable[[bytes], bytes]


class Client:
    """run() takes each connection through its share of the steps, one request after the other."""

    def __init__(self, connections: Sequence[_Connection]) -> None:
        self._connections = connections

    @classmethod
    async def connect(cls, port: int, count: int) -> Client:
        loop = asyncio.get_running_loop()
        made = [await loop.create_connection(_Connection, "127.0.0.1", port) for _ in range(count)]
        return cls([connection for _, connection in made])

    async def run(self, steps: Sequence[Step]) -> list[float]:
        """Seconds from each request for a place to its answer. Raises what a check raised."""
        todo = iter(steps)
        ends = [connection.begin(todo) for connection in self._connections]
        await asyncio.gather(*ends)
        return [s for connection in self._connections for s in connection.latencies]

    def close(self) -> None:
        for connection in self._connections:
            connection.transport.close()


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.latencies: list[float] = []
        self._data = b""
        self._step: Step | None = None

    def begin(self, todo: Iterator[Step]) -> asyncio.Future[None]:
        self._todo = todo
        self._end = asyncio.get_running_loop().create_future()
        self.latencies.clear()
        self._next()
        return self._end

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._end.done():
            self._end.set_exception(ConnectionError("the server closed a connection"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._data[:end].lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(self._data) < end + 4 + length:
            return
        body, self._data = self._data[end + 4 :], b""
        try:
            self._answered(head, body)
        except Exception as error:
            self._end.set_exception(error)

    def _answered(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"{head.decode()}: {body.decode()}")
        if self._step is None:
            self._next()
            return
        self.latencies.append(time.perf_counter() - self._sent_at)
        step, self._step = self._step, None
        self.transport.write(step.settle(body))

    def _next(self) -> None:
        self._step = next(self._todo, None)
        if self._step is None:
            self._end.set_result(None)
            return
        self._sent_at = time.perf_counter()
        self.transport.write(self._step.place)

"""A trace against a server of the OpenAI API, over real HTTP at the times of its rows.

Prompts are token ids made from the rows' block numbers: equal numbers give equal tokens, so that
the server's cache finds what the trace shared. Times count from when a request was due, not from
when it was sent: a client or server that lags makes latencies longer, never shorter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec
import numpy as np

from rtp.core.arrivals import Arrivals
from rtp.core.replayed import FAILED_TYPE, NAN, Replayed
from rtp.core.trace import TraceRow
from rtp.io.completion_reader import Completion, error_code

MOST_REASON = 48
LEAD_S = 0.05
"""So long before it is due a request is put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and how."""

    url: str
    """Of the server, without /v1."""
    model: str
    key: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Tokens of a trace's rows: a pure function of block numbers, the row's index and salt."""

    block_size: int
    first_id: int
    end_id: int
    """Token ids are drawn from first_id to end_id - 1: ordinary ones in every vocabulary."""
    salt: int = 0

    def tokens(self, row: TraceRow, index: int) -> list[int]:
        """[row.num_tokens]. What no block number stands for is the row's own, by its index."""
        out: list[int] = []
        for number in row.block_ids:
            left = min(self.block_size, row.num_tokens - len(out))
            out += self._drawn(np.random.SeedSequence((self.salt, number)), self.block_size)[:left]
        own = np.random.SeedSequence(self.salt, spawn_key=(index,))
        return out + self._drawn(own, row.num_tokens - len(out))

    def _drawn(self, seed: np.random.SeedSequence, count: int) -> list[int]:
        draws = np.random.default_rng(seed).integers(self.first_id, self.end_id, count)
        found: list[int] = draws.tolist()
        return found


@dataclass(frozen=True, slots=True)
class Sending:
    """How a run was sent and read."""

    late_s: float
    """How late the latest request was sent."""
    num_counted: int
    """Answers without a usage: their output tokens are the chunks that had text."""


async def replay_live(
    rows: Sequence[TraceRow],
    target: Target,
    prompts: Prompts,
    *,
    speed: float = 1.0,
    decode: bool = True,
    progress: Callable[[float], None] | None = None,
) -> tuple[Replayed, Sending]:
    """Sends every row once, in order, at its time over `speed`, and waits for all ends. decode:
    False asks for one token each. Grants and ranks are not seen from outside."""
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers
    ) as session:
        return await _Run(session, rows, target, prompts, speed, decode, progress).run()


@dataclass(slots=True)
class _Seen:
    """Of one request; times of time.monotonic()."""

    answer: Completion
    due: float = NAN
    first: float = NAN
    ended: float = NAN
    failed: str = "never sent"


class _Run:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        rows: Sequence[TraceRow],
        target: Target,
        prompts: Prompts,
        speed: float,
        decode: bool,
        progress: Callable[[float], None] | None,
    ) -> None:
        self._session = session
        self._rows = rows
        self._target = target
        self._prompts = prompts
        self._speed = speed
        self._decode = decode
        self._progress = progress
        self._seen = [_Seen(Completion(row.num_tokens)) for row in rows]
        self._arrivals = Arrivals(rows)
        self._over = 0
        self._late_s = 0.0

    async def run(self) -> tuple[Replayed, Sending]:
        start = time.monotonic() + LEAD_S
        async with asyncio.TaskGroup() as tasks:
            while (at := self._arrivals.next_s()) is not None:
                due = start + at / self._speed
                await asyncio.sleep(due - LEAD_S - time.monotonic())
                for index in self._arrivals.take():
                    tasks.create_task(self._request(tasks, index, due))
        counted = sum(not s.failed and not s.answer.has_usage for s in self._seen)
        return self._result(start), Sending(self._late_s, counted)

    async def _request(self, tasks: asyncio.TaskGroup, index: int, due: float) -> None:
        seen = self._seen[index]
        seen.due = due
        body = self._body(index)
        await asyncio.sleep(due - time.monotonic())
        self._late_s = max(self._late_s, time.monotonic() - due)
        try:
            seen.failed = await self._exchange(body, seen)
        except TimeoutError:
            seen.failed = "timeout"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            seen.failed = f"connection: {type(error).__name__}"
        seen.ended = time.monotonic()
        self._over += 1
        if self._progress is not None:
            self._progress(self._over / len(self._rows))
        for behind in self._arrivals.behind(index):
            due = seen.ended + self._rows[behind].think_s / self._speed
            tasks.create_task(self._request(tasks, behind, due))

    async def _exchange(self, body: bytes, seen: _Seen) -> str:
        """Sends it and reads the stream to its end. Why it failed; "" if it did not."""
        headers = {"Content-Type": "application/json"}
        url = f"{self._target.url}/v1/completions"
        async with self._session.post(url, data=body, headers=headers) as reply:
            if reply.status != 200:
                return f"{reply.status} {error_code(await reply.read())}"
            answer = seen.answer
            async for data in reply.content.iter_any():
                answer.feed(data)
                if answer.started and np.isnan(seen.first):
                    seen.first = time.monotonic()
                if answer.end is not None:
                    return answer.end
            return "cut off"

    def _body(self, index: int) -> bytes:
        row = self._rows[index]
        return msgspec.json.encode(
            {
                "model": self._target.model,
                "prompt": self._prompts.tokens(row, index),
                "max_tokens": row.num_output if self._decode else 1,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def _result(self, start: float) -> Replayed:
        seen = self._seen
        count = len(seen)
        first = np.array([s.first for s in seen])
        failed = np.array([s.failed[:MOST_REASON] for s in seen], dtype=FAILED_TYPE)
        return Replayed(
            arrival_s=np.array([s.due for s in seen]) - start,
            granted_s=np.full(count, NAN),
            first_s=first - start,
            ended_s=np.array([s.ended for s in seen]) - start,
            ranks=np.full(count, -1),
            prompt_tokens=np.array([row.num_tokens for row in self._rows]),
            cached_tokens=np.array([s.answer.cached_tokens for s in seen]),
            output_tokens=np.array([s.answer.output_tokens for s in seen]),
            attempts=np.zeros(count, dtype=np.int64),
            failed=failed,
            grants_seen=False,
        )

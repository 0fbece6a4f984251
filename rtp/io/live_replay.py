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
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rtp.core.arrivals import Arrivals
from rtp.core.replayed import FAILED_TYPE, NAN, Replayed
from rtp.core.trace import TraceRow
from rtp.io.sse_reader import Events

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
    """Tokens of a trace's blocks: a pure function of number and salt."""

    block_size: int
    first_id: int
    end_id: int
    """Token ids are drawn from first_id to end_id - 1: ordinary ones in every vocabulary."""
    salt: int = 0

    def tokens(self, row: TraceRow) -> list[int]:
        """[row.num_tokens]"""
        out: list[int] = []
        for number in row.block_ids:
            left = min(self.block_size, row.num_tokens - len(out))
            draws = np.random.default_rng((self.salt, number))
            out += draws.integers(self.first_id, self.end_id, self.block_size)[:left].tolist()
        return out


async def replay_live(
    rows: Sequence[TraceRow],
    target: Target,
    prompts: Prompts,
    *,
    speed: float = 1.0,
    decode: bool = True,
    progress: Callable[[float], None] | None = None,
) -> tuple[Replayed, float]:
    """Sends every row once, in order, at its time over `speed`, and waits for all ends. decode:
    False asks for one token each. Returns what came of them, and how late the latest one was sent.
    Grants and ranks are not seen from outside."""
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers
    ) as session:
        return await _Run(session, rows, target, prompts, speed, decode, progress).run()


@dataclass(slots=True)
class _Seen:
    """Of one request; times of time.monotonic()."""

    due: float = NAN
    first: float = NAN
    ended: float = NAN
    cached: int = 0
    output: int = 0
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
        self._seen = [_Seen() for _ in rows]
        self._arrivals = Arrivals(rows)
        self._over = 0
        self._late_s = 0.0

    async def run(self) -> tuple[Replayed, float]:
        start = time.monotonic() + LEAD_S
        async with asyncio.TaskGroup() as tasks:
            while (at := self._arrivals.next_s()) is not None:
                due = start + at / self._speed
                await asyncio.sleep(due - LEAD_S - time.monotonic())
                for index in self._arrivals.take():
                    tasks.create_task(self._request(tasks, index, due))
        return self._result(start), self._late_s

    async def _request(self, tasks: asyncio.TaskGroup, index: int, due: float) -> None:
        seen, row = self._seen[index], self._rows[index]
        seen.due = due
        body = self._body(row)
        await asyncio.sleep(due - time.monotonic())
        self._late_s = max(self._late_s, time.monotonic() - due)
        try:
            seen.failed = await self._exchange(body, seen)
        except TimeoutError:
            seen.failed = "timeout"
        except (aiohttp.ClientError, ValueError) as error:
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
                return f"{reply.status} {_code(await reply.read())}"
            events, finished = Events(), False
            async for data in reply.content.iter_any():
                for event in events.feed(data):
                    if event == b"[DONE]":
                        return "" if finished else "ended without a finish reason"
                    chunk = msgspec.json.decode(event)
                    if chunk.get("error"):
                        return f"stream error {_code(event)}"
                    finished |= self._take(chunk, seen)
            return "cut off"

    def _take(self, chunk: dict[str, Any], seen: _Seen) -> bool:
        """Whether this chunk tells of the end. Any: what JSON holds."""
        choices = chunk.get("choices") or ()
        if choices and np.isnan(seen.first):
            seen.first = time.monotonic()
        usage = chunk.get("usage")
        if usage:
            seen.output = int(usage.get("completion_tokens", 0))
            details = usage.get("prompt_tokens_details") or {}
            seen.cached = int(details.get("cached_tokens") or 0)
        return any(choice.get("finish_reason") for choice in choices)

    def _body(self, row: TraceRow) -> bytes:
        return msgspec.json.encode(
            {
                "model": self._target.model,
                "prompt": self._prompts.tokens(row),
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
            cached_tokens=np.array([s.cached for s in seen]),
            output_tokens=np.array([s.output for s in seen]),
            attempts=np.zeros(count, dtype=np.int64),
            failed=failed,
        )


def _code(body: bytes) -> str:
    """Of an OpenAI error; "" where it is none."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return ""

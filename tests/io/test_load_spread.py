"""Every way in reports its load: no endpoint sends all of its requests to one worker (W02)."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import pytest

from tests.support.live import live_cluster

WORKERS = 8
AT_ONCE = 480
OUTPUT = 32
"""Tokens that take longer than the client to send all of them: else few are there at once."""
HEAD = "the same beginning of every prompt, several blocks of it, " * 4


def a_chat(number: int, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{HEAD}{number}"}], **fields}


ENDPOINTS = {
    "completions": ("/v1/completions", lambda i: {"prompt": f"{HEAD}{i}"}),
    "completions, stream": ("/v1/completions", lambda i: {"prompt": f"{HEAD}{i}", "stream": True}),
    "chat": ("/v1/chat/completions", a_chat),
    "chat, stream": ("/v1/chat/completions", lambda i: a_chat(i, stream=True)),
    "schedule": (
        "/v1/schedule",
        lambda i: {"token_ids": [*range(200), 1000 + i], "model": "sim", "wait": False},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_w02_480_at_once_with_one_prefix_spread_over_8_workers(endpoint: str):
    path, body = ENDPOINTS[endpoint]
    connector = aiohttp.TCPConnector(limit=AT_ONCE)
    async with (
        live_cluster(workers=WORKERS, worker={"max_rows": 64}) as cluster,
        aiohttp.ClientSession(connector=connector) as session,
    ):

        async def one(number: int) -> None:
            request = {"max_tokens": OUTPUT, "ignore_eos": True, "seed": 1, **body(number)}
            async with session.post(cluster.url + path, json=request) as reply:
                await reply.read()
                assert reply.status == 200

        await asyncio.gather(*(one(number) for number in range(AT_ONCE)))
        placed = [note.fields for note in cluster.notes if note.event == "request.placed"]
    # On a busy machine a lease may run out before its Submit leaves: the last place counts.
    last = {fields["request_id"]: fields["worker_id"] for fields in placed}
    counts = Counter(last.values())
    assert sum(counts.values()) == AT_ONCE
    assert max(counts.values()) <= 1.5 * AT_ONCE / WORKERS, counts

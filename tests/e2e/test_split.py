"""Prefill and decode workers over real sockets: the same answers as from one worker, and none lost
to a kill -9."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.live import QUICK, live_cluster

AT_ONCE = {"name": "sim", "params": {"latency_s": 0.0, "tokens_per_s": 1e12}}
"""Else an idle decode rank would compute the prompt itself, and be right."""
BAIT = {"tp_size": 1_000_000_000, "remote_host": "169.254.169.254", "do_remote_prefill": True}
BODIES: list[dict[str, Any]] = [
    {"max_tokens": 40, "temperature": 0},
    {"max_tokens": 40, "temperature": 1.0, "seed": 11},
    {"max_tokens": 20, "temperature": 1.0, "seed": 12, "n": 3},
    {"max_tokens": 1},
]


def prompt(number: int) -> list[int]:
    return [3 + (7 * number + i * i) % 900 for i in range(70 + number)]


async def texts(client: Client) -> list[list[str]]:
    answers = await asyncio.gather(
        *(client.complete(prompt(i), **body) for i, body in enumerate(BODIES))
    )
    return [[choice["text"] for choice in answer["choices"]] for answer in answers]


async def test_split_answers_are_those_of_one_worker():
    """Case P17 as well: what a client says of transfers is nobody's business."""
    async with live_cluster(workers=1) as cluster, Client(cluster.url, "sim") as client:
        right = await texts(client)
    roles = ("prefill", "decode", "decode")
    async with live_cluster(workers=3, roles=roles, worker={"transport": AT_ONCE}) as cluster:
        async with Client(cluster.url, "sim") as client:
            assert await texts(client) == right
            assert await texts(client) == right
            body = BODIES[0] | {"kv_transfer_params": BAIT}
            answer = await client.complete(prompt(0), **body)
            assert [choice["text"] for choice in answer["choices"]] == right[0], "P17: not read"
            _, shown = await client.get("/dashboard/data.json")
            _, metrics = await client.get("/metrics")
        overview = shown["overview"]
        assert overview["requests"]["split"] >= 4
        assert overview["requests"]["handovers"] >= 4
        assert "rtp_handovers_total" in metrics
        assert {w["role"] for w in overview["workers"]} == {"prefill", "decode"}
        stats = [w.server.loop.core.stats for w in cluster.workers if w.server and w.server.loop]
        assert sum(s.pulled_tokens for s in stats[1:]) > 0
        assert stats[0].generated_tokens <= 2 * sum(body.get("n", 1) for body in BODIES)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
async def test_no_stream_is_lost_to_a_killed_process(victim: int):
    """Cases P12: kill -9 of a prefill or decode worker while 12 streams run over both."""
    params = QUICK | {"d": 0.01, "b": 2e-4, "realtime": True}
    body: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 5}
    async with live_cluster(workers=1) as cluster, Client(cluster.url, "sim") as client:
        right = [
            (await client.complete(prompt(i), **body))["choices"][0]["text"] for i in range(12)
        ]
    async with live_cluster(
        workers=4,
        roles=("prefill", "decode", "decode", "prefill"),
        processes=True,
        params=params,
        worker={"transport": AT_ONCE},
    ) as cluster:
        async with Client(cluster.url, "sim") as client:
            begun = asyncio.Event()
            streams = [
                asyncio.create_task(
                    client.stream(prompt(i), on_chunk=lambda out: begun.set(), **body)
                )
                for i in range(12)
            ]
            await begun.wait()
            await cluster.kill(victim)
            outs = await asyncio.gather(*streams)
            assert [(out.error, out.text) for out in outs] == [(None, text) for text in right]
            _, shown = await client.get("/dashboard/data.json")
        assert shown["overview"]["requests"]["handovers"] > 0

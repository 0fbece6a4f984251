"""Ten minutes of random mixed traffic with disconnects against real workers (`make soak`)."""

from __future__ import annotations

import asyncio
import os
import random
import time

import psutil
import pytest

from bench.servers import Server, rtp
from tests.e2e.test_real_model import quiet
from tests.support.client import Client

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
STREAMS = 12


def memory_mb(server: Server) -> float:
    """Resident memory of the whole tree."""
    root = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)]) / 1e6


async def one(client: Client, rng: random.Random, counts: dict[str, int]) -> None:
    """One random request: stream or not, n, echo, sampling, stops, a client that leaves."""
    shared = [1000 + i for i in range(rng.choice([0, 32, 128]))]
    prompt = shared + [rng.randrange(17, 49152) for _ in range(rng.choice([1, 8, 40, 200]))]
    body = {
        "max_tokens": rng.choice([1, 8, 30]),
        "temperature": rng.choice([0, 0.8, 1.2]),
        "n": rng.choice([1, 1, 1, 2]),
        "seed": rng.randrange(1 << 30),
    }
    if rng.random() < 0.2:
        body["stop"] = [" the", "\n"]
    if rng.random() < 0.1:
        body["logprobs"] = 2
    kind = rng.random()
    if kind < 0.3:
        out = await client.stream(prompt, leave_after=rng.choice([1, 2, 5]), **body)
        counts["left in stream"] += 1
        assert out.error is None
    elif kind < 0.45:
        limit = rng.uniform(0.0, 0.4)
        try:
            await asyncio.wait_for(client.complete(prompt, **body), limit)
        except TimeoutError:
            counts["left waiting"] += 1
    elif kind < 0.75:
        out = await client.stream(prompt, **body)
        assert (out.error, out.done) == (None, True)
        counts["streamed"] += 1
    elif kind < 0.95:
        await client.complete(prompt, **body)
        counts["answered"] += 1
    else:
        status, _ = await client.post("/v1/completions", prompt=[99999999])
        assert status == 400
        counts["refused"] += 1


async def traffic(client: Client, seed: int, until: float, counts: dict[str, int]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until:
        await one(client, rng, counts)


async def test_ten_minutes_of_mixed_traffic_leave_nothing_behind():
    counts = dict.fromkeys(["left in stream", "left waiting", "streamed", "answered", "refused"], 0)
    with rtp(workers=2) as server:
        async with Client(server.url) as client:
            end = time.monotonic() + SECONDS
            marks = []
            for part in range(5):  # the first part fills caches; the others must stay flat
                until = min(end, time.monotonic() + SECONDS / 5)
                await asyncio.gather(
                    *(traffic(client, part * STREAMS + i, until, counts) for i in range(STREAMS))
                )
                await quiet(client, within_s=2.0)
                marks.append(memory_mb(server))
                print(f"part {part + 1}: {counts}, {marks[-1]:.0f} MB", flush=True)
    assert all(counts.values()), counts
    assert marks[-1] < marks[1] * 1.05, f"memory grew: {marks}"

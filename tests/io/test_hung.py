"""A rank's process that stands still while its worker's control process is well (SIGSTOP)."""

from __future__ import annotations

import asyncio

import aiohttp
import psutil
import pytest

from tests.support.client import Client
from tests.support.live import LiveCluster, live_cluster
from tests.support.processes import ranks

pytestmark = pytest.mark.slow


def states(cluster: LiveCluster) -> list[str]:
    return [worker["state"] for worker in cluster.master.overview()["workers"]]


async def seen(cluster: LiveCluster, wanted: list[str], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while states(cluster) != wanted:  # noqa: ASYNC110  a Status changes it, of which no Note tells
            await asyncio.sleep(0.02)


async def test_o01_a_worker_whose_rank_stands_still_is_left_out_until_it_goes_on():
    """Its own /health is 503 while /live is 200; requests go elsewhere, and none is lost."""
    master = {"routing": {"name": "round_robin"}}
    async with (
        live_cluster(workers=2, processes=True, master=master) as cluster,
        aiohttp.ClientSession() as session,
        Client(cluster.url, "sim") as client,
    ):
        stopped = ranks(psutil.Process(cluster.workers[0].pid))[0]
        address = cluster.master.overview()["workers"][0]["address"]

        async def probe(path: str) -> int:
            async with session.get(f"http://{address}{path}") as answer:
                return answer.status

        async def metrics() -> str:
            async with session.get(f"{cluster.url}/metrics") as answer:
                return await answer.text()

        stopped.suspend()
        try:
            first = [asyncio.create_task(client.stream([5, 6, i], max_tokens=8)) for i in range(2)]
            await seen(cluster, ["hung", "ready"], 10.0)
            assert (await probe("/health"), await probe("/live")) == (503, 200)
            assert 'rtp_workers{state="hung"} 1.0' in await metrics()
            assert [task.done() for task in first].count(True) == 1
            for i in range(6):
                reply = await client.stream([7, 8, i], max_tokens=8)
                assert reply.finish == "length"
            assert states(cluster) == ["hung", "ready"], "silent it is not"
        finally:
            stopped.resume()
        await seen(cluster, ["ready", "ready"], 5.0)
        assert {reply.finish for reply in await asyncio.gather(*first)} == {"length"}
        assert await probe("/health") == 200
        later = [client.stream([9, 9, i], max_tokens=8) for i in range(4)]
        assert {reply.finish for reply in await asyncio.gather(*later)} == {"length"}

"""Streams that are delayed, torn and closed in the middle of frames lose and repeat no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from tests.io.test_loops_faults import STEPS, run
from tests.support.live import LiveCluster, live_cluster
from tests.support.proxy import Proxy


@asynccontextmanager
async def behind_proxies(
    workers: int, seed: int, trouble: float, links: bool = False
) -> AsyncIterator[tuple[LiveCluster, list[Proxy]]]:
    async with live_cluster(workers=workers, params=STEPS, start=False) as cluster:
        proxies = [await Proxy(Random(seed + i), trouble, links).start() for i in range(workers)]
        try:
            await cluster.start_master()
            for index, proxy in enumerate(proxies):
                worker = cluster.workers[index]
                worker.config = worker.config.model_copy(update={"advertise": proxy.address})
                await cluster.start_worker(index)
                assert worker.server is not None
                assert worker.server._listener is not None
                proxy.target = worker.server._listener.getsockname()[1]
            await cluster.ready()
            yield cluster, proxies
        finally:
            for proxy in proxies:
                await proxy.close()


async def quiet(cluster: LiveCluster) -> None:
    """Nothing is left anywhere of the requests that ended."""
    cores = [worker.server.loop.core for worker in cluster.workers if worker.server]
    async with asyncio.timeout(20):
        while not (  # noqa: ASYNC110  no event tells
            cluster.master._core.idle()
            and cluster.master._requests.idle()
            and all(core.idle() for core in cores)
        ):
            await asyncio.sleep(0.02)


async def test_torn_streams_cost_no_token():
    async with behind_proxies(workers=2, seed=1, trouble=0.05) as (cluster, proxies):
        faults = await asyncio.gather(*(run(cluster, i, 60) for i in range(16)))
        assert not any(faults), [fault for fault in faults if fault]
        assert sum(proxy.counts.total() for proxy in proxies) > 5
        for proxy in proxies:
            proxy.trouble = 0.0
        await quiet(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("links", [False, True])
async def test_many_torn_connections_cost_no_token(links: bool):
    async with behind_proxies(workers=3, seed=2, trouble=0.01, links=links) as (cluster, proxies):
        for wave in range(6):
            waves = (run(cluster, 100 * wave + i, 100) for i in range(24))
            faults = [fault for fault in await asyncio.gather(*waves) if fault]
            assert not faults
        for proxy in proxies:
            assert proxy.counts["cut"] + proxy.counts["closed"] + proxy.counts["half"] > 0
            proxy.trouble = 0.0
        await quiet(cluster)

"""Master, frontend and workers as processes of their own: the Master killed -9 under streams."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from bench.checked import Checked
from bench.cluster import cluster
from bench.flap import STEPS, events, nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
STREAMS = 16


async def test_sixteen_streams_outlive_a_killed_master_and_its_successor_takes_over():
    async with cluster(workers=2, params=STEPS) as it, aiohttp.ClientSession() as session:
        checked = Checked(it.url, session)
        running = [asyncio.create_task(checked.stream(i, 200)) for i in range(STREAMS)]
        await it.until(lambda overview: overview["bookings"] == STREAMS)
        restart = asyncio.create_task(it.restart_master())
        await asyncio.sleep(0)  # it is killed before anything else is asked
        waiting = [asyncio.create_task(checked.stream(100 + i, 20)) for i in range(4)]
        away_s, rebuild_s = await restart
        print(f"Master away for {1e3 * away_s:.0f} ms, rebuilt in {1e3 * rebuild_s:.0f} ms more")
        assert await asyncio.gather(*running, *waiting) == [""] * (STREAMS + 4)
        await it.until(lambda overview: bool(overview) and nothing_left(overview))
        seen = await events(it)
        assert seen.get("request.displaced", 0) == 0  # no stream was touched
        assert seen["master.joined"] == 2

"""A frontend apart from the Master: what goes on while the Master is away, and after it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from tests.io.test_loops_faults import STEPS, run
from tests.support.client import Client
from tests.support.live import LiveCluster, live_cluster
from tests.support.proxy import Proxy

APART = {"frontend": False}


async def settled(cluster: LiveCluster) -> None:
    """Nothing is charged to any rank, and no request lives."""
    await until(lambda: cluster.master._core.idle() and cluster.apart.api.requests.idle())


async def until(true: Callable[[], bool]) -> None:
    """For what no event tells of."""
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110  as above
            await asyncio.sleep(0.01)


async def test_clients_are_served_by_the_frontend_and_not_by_the_master():
    async with live_cluster(workers=2, master=APART) as cluster:
        assert await run(cluster, 1, 20) == ""
        async with Client(cluster.url, "sim") as client:
            assert (await client.get("/health"))[0] == 200
            assert [m["id"] for m in (await client.get("/v1/models"))[1]["data"]] == ["sim"]
            assert (await client.stream([5, 6, 7], max_tokens=9)).done
            assert "\nrtp_master_connected 1.0\n" in (await client.get("/metrics"))[1]
        async with Client(cluster.master.url, "sim") as client:
            assert (await client.get("/health"))[0] == 200
            assert (await client.get("/dashboard/data.json"))[0] == 200
            # Its frontend apart, and what answers POST /v1/schedule.
            assert "\nrtp_frontends 2.0\n" in (await client.get("/metrics"))[1]
            assert (await client.get("/v1/models"))[0] == 404
            assert (await client.post("/v1/completions", prompt=[5]))[0] == 404
        await settled(cluster)


async def test_clients_need_a_key_where_the_frontend_has_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RTP_API_KEY", "k")
    body = {"prompt": [5], "max_tokens": 1}
    async with (
        live_cluster(workers=1, master=APART) as cluster,
        Client(cluster.url, "sim") as client,
    ):
        assert (await client.post("/v1/completions", **body))[0] == 401
        client.session.headers["Authorization"] = "Bearer k"
        assert (await client.post("/v1/completions", **body))[0] == 200


async def test_what_tells_of_models_is_for_those_who_hold_the_secret():
    async with live_cluster(workers=1, master=APART) as cluster:
        card = cluster.frontend.models["sim"].digest()
        async with Client(cluster.master.url) as client:
            for path in ("/internal/models", f"/internal/cards/{card}"):
                assert (await client.get(path))[0] == 401
            assert (await client.get("/internal/ask"))[0] == 400


async def test_streams_run_on_without_a_master_and_requests_wait_for_it():
    async with live_cluster(workers=2, params=STEPS, master=APART) as cluster:
        running = [asyncio.create_task(run(cluster, i, 400)) for i in range(4)]
        counters = cluster.apart.api.counters
        await until(lambda: len(cluster.master._core.ledger) == 4)
        await cluster.stop_master()
        assert not cluster.apart.ready()
        async with Client(cluster.url, "sim") as client:
            status, body = await client.get("/health")
            assert (status, body["error"]["message"]) == (503, "The Master does not answer")
            assert "\nrtp_master_connected 0.0\n" in (await client.get("/metrics"))[1]
            assert (await client.get("/live"))[0] == 200
        waiting = [asyncio.create_task(run(cluster, 10 + i, 40)) for i in range(4)]
        impatient = await run(cluster, 20, 40, timeout_s=0.3)
        assert "status=504" in impatient
        assert not any(task.done() for task in waiting)
        await cluster.start_master()
        assert await asyncio.gather(*running, *waiting) == [""] * 8
        assert (counters.replacements, counters.failed) == (0, 1)
        await cluster.ready()
        await settled(cluster)


async def test_a_connection_that_breaks_costs_nothing():
    """The Master lives on: grants that were on their way come again, queued requests are asked
    anew, and none runs twice."""
    async with live_cluster(workers=2, params=STEPS, master=APART) as cluster:
        running = [asyncio.create_task(run(cluster, i, 60)) for i in range(48)]
        for _ in range(6):
            await asyncio.sleep(0.03)
            for link in list(cluster.master.loop._asks._links.values()):
                link.abort("the test wants it")
        assert await asyncio.gather(*running) == [""] * 48
        assert cluster.apart.api.counters.duplicates == 0
        await settled(cluster)


@pytest.mark.slow
async def test_a_partitioned_worker_that_returns_adds_no_byte_to_a_request_placed_anew():
    """What it computed meanwhile arrives late, in the middle of the attempt that took its place."""
    async with live_cluster(workers=2, params=STEPS, master=APART, start=False) as cluster:
        proxy = await Proxy(Random(1), trouble=0.0).start()
        try:
            await cluster.start_master()
            worker = cluster.workers[0]
            worker.config = worker.config.model_copy(update={"advertise": proxy.address})
            await asyncio.gather(*(cluster.start_worker(i) for i in range(2)))
            proxy.target = worker.server._listener.getsockname()[1]
            await cluster.ready()
            running = [asyncio.create_task(run(cluster, i, 1300)) for i in range(8)]
            core, lives = worker.server.loop.core, cluster.apart.api.requests._lives
            await until(lambda: len(lives) == 8 and all(r.first_token for r in lives))
            proxy.partition()
            await cluster.noted(lambda note: note.event == "worker.lost")
            await cluster.noted(lambda note: note.event == "request.displaced")
            counters = cluster.apart.api.counters
            assert counters.resumes > 0
            assert counters.strays == 0
            proxy.heal()
            assert await asyncio.gather(*running) == [""] * 8
            assert counters.strays > 0  # late tokens did come
            await cluster.ready(2)
            await settled(cluster)
            await until(core.idle)
        finally:
            await proxy.close()

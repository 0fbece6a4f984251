"""Real worker processes killed -9 under load: every request ends with the tokens it should have."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from rtp.backends.sim import Rule, expected_tokens
from rtp.core.events import Begin
from rtp.core.hashing import block_hashes, namespace
from rtp.core.types import RequestId, SamplingParams, pack_ids
from rtp.worker import WorkerServer
from tests.support.live import LiveCluster, live_cluster

pytestmark = pytest.mark.slow

RULE = Rule(vocab_size=32000, eos_ids=(2,))
STEPS = {"a": 1e-3, "b": 1e-5, "c": 0.0, "d": 3e-3, "e": 1e-5, "f": 0.0}


async def run(cluster: LiveCluster, number: int, tokens: int, timeout_s: float = 60.0) -> str:
    """One request; '' when it ended with the right tokens."""
    prompt = [7, *range(100, 140), 1000 + number]
    ids, seed = pack_ids(prompt), namespace(secret=cluster.secret, revision="r")
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    handle = cluster.frontend.begin(
        Begin(
            request_id=RequestId(f"r{number}"),
            model="sim",
            prompt=ids,
            hashes=block_hashes(ids, 16, seed),
            namespace=seed,
            sampling=sampling,
            timeout_s=timeout_s,
        )
    )
    got: list[int] = []
    async for command in handle:
        for chunk in getattr(command, "chunks", ()):
            got += chunk.ids
    if type(command).__name__ != "Ended":
        return f"r{number}: {command}"
    wanted = expected_tokens(RULE, prompt, sampling)
    return "" if got == wanted else f"r{number}: {len(got)} tokens, not those expected"


async def test_workers_killed_under_load_cost_no_token():
    """Design section 11: re-placed when nothing was streamed, resumed when something was."""
    async with live_cluster(workers=3, processes=True, params=STEPS) as cluster:
        numbers = itertools.count()
        faults: list[str] = []
        killing = True

        async def client() -> None:
            while killing:
                fault = await run(cluster, next(numbers), 120)
                if fault:
                    faults.append(fault)

        clients = [asyncio.create_task(client()) for _ in range(8)]
        for kill in range(6):
            await cluster.kill(kill % 3)
            await cluster.start_worker(kill % 3)
            await cluster.ready(2)
            await asyncio.sleep(0.4)
        killing = False
        await asyncio.gather(*clients)
        assert faults == []
        counters = cluster.master.frontend.driver._core.counters
        assert counters.replacements > 0
        assert counters.resumes > 0
        await cluster.ready(3)
        async with asyncio.timeout(5):
            while cluster.master.overview()["bookings"]:  # noqa: ASYNC110  no event tells
                await asyncio.sleep(0.05)


async def test_a_master_killed_under_load_is_rejoined_and_workers_free_what_they_held():
    """Its own frontend's streams end with it; workers cancel after ten seconds without."""
    async with live_cluster(workers=2, processes=True, params=STEPS) as cluster:
        running = [asyncio.create_task(run(cluster, i, 4000)) for i in range(4)]
        await asyncio.sleep(0.3)
        for task in running:
            task.cancel()
        await cluster.stop_master()
        await cluster.start_master()
        await cluster.ready(2)
        assert await run(cluster, 100, 50) == ""
        async with asyncio.timeout(20):
            while True:
                ranks = [w["ranks"][0] for w in cluster.master.overview()["workers"]]
                if len(ranks) == 2 and all(r["decode_rows"] == 0 for r in ranks):
                    return
                await asyncio.sleep(0.1)


async def test_a_worker_whose_epochs_go_back_serves_again(monkeypatch: pytest.MonkeyPatch):
    """Its state directory is lost and the clock of its new machine is behind."""
    async with live_cluster(workers=1) as cluster:
        await cluster.kill(0)
        monkeypatch.setattr(WorkerServer, "_epoch", lambda self: 5)
        worker = cluster.workers[0]
        worker.config = worker.config.model_copy(update={"dp": 2})
        await cluster.start_worker(0)
        await cluster.noted(lambda note: note.event == "worker.lost")
        await cluster.ready()
        assert await run(cluster, 1, 20) == ""

"""Workers of several ranks as real processes: they serve, and how they end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.io.test_loops_faults import run
from tests.support.checkpoints import tiny_checkpoint
from tests.support.client import Client
from tests.support.live import live_cluster
from tests.support.processes import ranks as ranks_of

pytestmark = pytest.mark.slow

STEPS = {"a": 1e-3, "b": 1e-5, "c": 0.0, "d": 1e-3, "e": 1e-5, "f": 0.0}


@pytest.mark.parametrize("lockstep", [False, True])
async def test_four_ranks_serve_and_a_dead_one_ends_its_worker(lockstep):
    """What they ran goes to the other worker, and no token is lost."""
    ranks = {"dp": 4, "lockstep": lockstep}
    async with live_cluster(workers=2, processes=True, params=STEPS, worker=ranks) as cluster:
        faults = await asyncio.gather(*(run(cluster, number, 60) for number in range(16)))
        assert not any(faults)
        workers = cluster.master.overview()["workers"]
        assert [len(worker["ranks"]) for worker in workers] == [4, 4]
        running = [asyncio.create_task(run(cluster, number, 600)) for number in range(100, 108)]
        process = cluster.workers[0].process
        assert process is not None
        four = ranks_of(psutil.Process(process.pid))
        assert len(four) == 4
        four[2].kill()
        async with asyncio.timeout(10):
            assert await process.wait() == 1
        assert not any(await asyncio.gather(*running))
        assert not psutil.wait_procs(four, 5)[1]


async def test_ranks_that_step_together_compute_as_one_alone(tmp_path: Path):
    """The CPU backend, whose ranks take a dummy step while others work."""
    model = str(tiny_checkpoint(tmp_path, "llama"))
    prompts = [list(range(5 + i, 20 + 9 * i)) for i in range(8)]
    answers = []
    for ranks in ({}, {"dp": 2, "lockstep": True}):
        worker = {"dtype": "fp32", "served_name": "tiny", **ranks}
        async with (
            live_cluster(1, "torch_cpu", model=model, processes=True, worker=worker) as cluster,
            Client(cluster.url, "tiny") as client,
        ):
            replies = [
                client.complete(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts
            ]
            answers.append([reply["choices"] for reply in await asyncio.gather(*replies)])
    assert answers[0] == answers[1]

"""A Runner in its own process: starts, steps, fails, and never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from rtp.config import WorkerConfig
from rtp.core.steps import Known, Row, SequenceStart, StepPlan
from rtp.core.types import SamplingParams, pack_ids
from rtp.io.runner_process import (
    Broken,
    Done,
    FromRunner,
    Progress,
    Ready,
    RunnerProcess,
    prepare,
)
from rtp.rank import load
from tests.support.live import QUICK, ROOT, runner_spec


def spec(backend: str = "sim", **params: object):
    return runner_spec(WorkerConfig(backend=backend, model="sim", params=QUICK | params))


class Events:
    def __init__(self) -> None:
        self.all: list[FromRunner] = []
        self._news = asyncio.Event()

    def __call__(self, event: FromRunner) -> None:
        self.all.append(event)
        self._news.set()

    async def got(self, kind: type[FromRunner]) -> FromRunner:
        async with asyncio.timeout(30):
            while not (found := [e for e in self.all if isinstance(e, kind)]):
                self._news.clear()
                await self._news.wait()
        return found[0]


@contextlib.asynccontextmanager
async def running(events: Events, **params: object) -> AsyncIterator[RunnerProcess]:
    process = RunnerProcess(spec(**params), threads=1)
    await process.start(events)
    try:
        yield process
    finally:
        await process.close()


async def test_it_tells_what_it_is_and_runs_steps():
    events = Events()
    async with running(events) as process:
        ready = await events.got(Ready)
        assert isinstance(ready, Ready)
        assert isinstance(events.all[0], Progress)
        assert ready.card.model == "sim"
        assert ready.card.max_model_len == ready.capacity.max_model_len
        assert len(ready.profile) == 6
        start = SequenceStart(1, 0, pack_ids([5, 6]), b"", SamplingParams(max_tokens=1), ())
        row = Row(1, 0, 2, Known(pack_ids([5, 6])), pack_ids([0]), 0)
        process.submit(StepPlan(0, (row,), (start,)))
        done = await events.got(Done)
        assert isinstance(done, Done)
        assert done.result.step == 0
        assert done.result.rows[0].token >= 0
        child = psutil.Process(process.pid)
    assert not child.is_running()
    assert not any(isinstance(e, Broken) for e in events.all)


async def test_a_kill_is_noticed_once():
    events = Events()
    async with running(events) as process:
        await events.got(Ready)
        os.kill(process.pid, signal.SIGKILL)
        assert await events.got(Broken) == Broken("ended with -9 (SIGKILL)")
    assert sum(isinstance(e, Broken) for e in events.all) == 1


async def test_a_runner_that_cannot_be_built_says_why():
    events = Events()
    async with running(events, no_such_parameter=1):
        broken = await events.got(Broken)
        assert isinstance(broken, Broken)
        assert "no_such_parameter" in broken.reason


async def test_it_does_not_outlive_a_parent_that_is_killed():
    """The kernel ends it, and the socket's end of file would."""
    code = (
        "import asyncio, sys\n"
        "from tests.io.test_runner_process import Events, Ready, running\n"
        "async def main():\n"
        "    events = Events()\n"
        "    async with running(events) as process:\n"
        "        await events.got(Ready)\n"
        "        print(process.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    await parent.wait()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [child], 10)
    assert gone == [child]


@pytest.mark.parametrize(
    ("settings", "name"), [({}, "sim"), ({"served_name": "mine"}, "mine"), ({"model": "x"}, "sim")]
)
def test_a_simulated_worker_never_has_the_name_of_a_real_model(settings: dict, name: str):
    simulated = runner_spec(WorkerConfig(backend="sim", params=QUICK, **settings))
    _, ready = prepare(simulated, load, lambda line: None)
    assert ready.card.model == name

"""rtp.local as a person runs it: real processes, killed, stopped, refused."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.support.checkpoints import tiny_checkpoint
from tests.support.live import ROOT
from tests.support.processes import kill, workers

pytestmark = pytest.mark.slow


class Running:
    """rtp.local, its output so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    @property
    def url(self) -> str:
        return next(
            found[0] for line in self.lines if (found := re.findall(r"http://[\d.:]+\d", line))
        )

    @property
    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    async def until(self, text: str) -> str:
        """Reads on to a line that contains `text`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            async for line in self.process.stdout:
                self.lines.append(line.decode().rstrip())
                if text in self.lines[-1]:
                    return self.lines[-1]
        raise AssertionError(f"ended before {text!r}: {self.lines}")

    async def ready(self, count: int) -> list[str]:
        """Waits for so many ready workers; returns their ids and epochs."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:
                async with session.get(f"{self.url}/dashboard/data.json") as answer:
                    found = (await answer.json())["overview"]["workers"]
                ready = [f"{w['worker_id']}@{w['epoch']}" for w in found if w["state"] == "ready"]
                if len(ready) == count:
                    return ready
                await asyncio.sleep(0.05)


@asynccontextmanager
async def local(tmp_path: Path, *flags: str) -> AsyncIterator[Running]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rtp.local", "--backend=sim", "--model=sim", "--port=0"),
        *("--drain-s=1", *flags),
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("RTP_")}
        | {"XDG_STATE_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    running = Running(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def ended(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 10)
    assert alive == []


async def test_it_starts_answers_and_leaves_nothing_behind(tmp_path: Path):
    async with local(tmp_path) as running:
        await running.until("Stop: Ctrl-C")
        text = "\n".join(running.lines)
        assert "worker-0: ready" in text
        assert "> What is the capital of France?" in text
        assert f"curl {running.url}/v1/chat/completions" in text
        assert f"{running.url}/dashboard" in text
        secret = tmp_path / "rtp" / "cluster.secret"
        assert secret.stat().st_mode & 0o777 == 0o600
        children = running.descendants
        assert len(children) == 5  # the Master, two workers, two ranks
        running.process.send_signal(signal.SIGINT)
        await running.until("stopping")
        assert await running.process.wait() == 0
        await ended(children)


async def test_a_killed_worker_is_started_again(tmp_path: Path):
    async with local(tmp_path, "--ask=false") as running:
        await running.until("Stop: Ctrl-C")
        before = await running.ready(2)
        kill(workers(running.process.pid)[0])
        assert "ended with -9; starting again" in await running.until("starting again")
        assert "worker-" in await running.until("ready again")
        while True:
            after = await running.ready(2)
            if len(set(before) & set(after)) == 1:
                break
        assert {w.partition("@")[0] for w in after} == {"worker-0", "worker-1"}


async def test_a_worker_says_that_its_rank_was_killed_and_is_ready_again(tmp_path: Path):
    async with local(tmp_path, "--ask=false", "--workers=1") as running:
        await running.until("Stop: Ctrl-C")
        next(p for p in running.descendants if "rtp.rank" in p.cmdline()).kill()
        line = await running.until("starting again")
        assert "rank 0: ended with -9 (SIGKILL)" in line
        assert await running.until("ready again") == "worker-0: ready again"


async def test_a_model_without_a_chat_template_is_greeted_with_text(tmp_path: Path):
    folder = tiny_checkpoint(tmp_path, "llama")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    flags = ["--backend=torch_cpu", f"--model={folder}", "--workers=1"]
    async with local(tmp_path, *flags) as running:
        await running.until("Stop: Ctrl-C")
        text = "\n".join(running.lines)
        assert "> The capital of France is" in text
        assert "no answer" not in text
        assert f"curl {running.url}/v1/completions" in text


async def test_a_killed_master_is_started_again_and_found_by_its_workers(tmp_path: Path):
    async with local(tmp_path, "--ask=false") as running:
        await running.until("Stop: Ctrl-C")
        before = await running.ready(2)
        master = next(p for p in running.descendants if "rtp.master" in p.cmdline())
        master.kill()
        await running.until("master: ended")
        async with asyncio.timeout(30):
            while True:
                try:
                    assert await running.ready(2) == before
                    break
                except (aiohttp.ClientError, OSError):
                    await asyncio.sleep(0.05)


async def test_no_orphans_when_it_is_killed(tmp_path: Path):
    async with local(tmp_path, "--ask=false") as running:
        await running.until("Stop: Ctrl-C")
        children = running.descendants
        assert len(children) == 5
        running.process.kill()
        await running.process.wait()
        await ended(children)


async def test_a_second_interrupt_ends_at_once(tmp_path: Path):
    slow = ["--set", "params.d=0.2", "--drain-s=60"]
    async with local(tmp_path, "--ask=false", *slow) as running:
        await running.until("Stop: Ctrl-C")
        children = running.descendants
        async with aiohttp.ClientSession() as session:
            body = {"model": "sim", "prompt": "x", "max_tokens": 1000, "stream": True}
            async with session.post(f"{running.url}/v1/completions", json=body) as answer:
                await answer.content.readline()
                running.process.send_signal(signal.SIGINT)
                await running.until("stopping")
                running.process.send_signal(signal.SIGINT)
                async with asyncio.timeout(10):
                    assert await running.process.wait() == 130
        await ended(children)


async def test_a_port_in_use_is_one_clear_line(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with local(tmp_path, f"--port={port}") as running:
            line = await running.until(f"cannot listen on 127.0.0.1:{port}: Address already in use")
            assert line.count(str(port)) == 1
            assert await running.process.wait() == 1
            assert running.lines == [line]


async def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason(tmp_path: Path):
    async with local(tmp_path, "--backend=torch_cpu", "--model=no-such-model") as running:
        line = await running.until("did not start")
        assert "no-such-model" in line
        assert await running.process.wait() == 1


async def test_a_stopped_worker_is_left_out_until_it_goes_on(tmp_path: Path):
    """Cases O01: SIGSTOP; suspect within 0.5 s plus a beat, back when it answers again."""
    async with local(tmp_path, "--ask=false") as running:
        await running.until("Stop: Ctrl-C")
        await running.ready(2)
        stopped = workers(running.process.pid)[0]
        stopped.suspend()
        try:
            async with asyncio.timeout(2.5):
                await running.ready(1)
        finally:
            stopped.resume()
        await running.ready(2)


async def test_a_frontend_of_its_own_serves_while_the_master_is_started_again(tmp_path: Path):
    async with local(tmp_path, "--ask=false", "--frontends=1", "--workers=1") as running:
        await running.until("Stop: Ctrl-C")
        line = next(line for line in running.lines if line.startswith("Frontend of its own: "))
        url = line.rpartition(" ")[2]
        master = next(p for p in running.descendants if "rtp.master" in p.cmdline())
        body = {"model": "sim", "prompt": "x", "max_tokens": 20, "temperature": 0}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                before = (await answer.json())["choices"]
            master.kill()
            await running.until("master: ended")
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert (await answer.json())["choices"] == before

"""A cluster of real processes on loopback, for what kills them: Master, frontend, simulated
workers.

    async with cluster(workers=8) as it:
        ... requests to it.url; it.worker(3).kill(); it.worker(3).start()

Each part keeps its command: after kill() (SIGKILL, and its children with it) start() is its next
life, at the same address where others have to find it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.report import ROOT
from bench.servers import free_port
from rtp.io.handshake import read_secret

LOOK_S = 0.01
STOP_S = 10.0
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("RTP_")}


@dataclass
class Part:
    """One process of the cluster."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0

    def start(self) -> None:
        self.lives += 1
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env=ENVIRONMENT,
                start_new_session=True,
            )

    def kill(self, number: int = signal.SIGKILL) -> None:
        """SIGKILL of the whole group: no word to anybody."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def check(self) -> None:
        """Raises RuntimeError, with the end of its log, when it has ended by itself."""
        if self.process is not None and self.process.poll() is not None:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{tail}")


@dataclass
class Cluster:
    """See the module's text."""

    master: Part
    frontend: Part
    workers: list[Part]
    master_url: str
    url: str
    """Of the frontend."""
    secret: bytes
    session: aiohttp.ClientSession
    parts: list[Part] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [self.master, self.frontend, *self.workers]

    async def overview(self) -> Mapping[str, Any]:  # Any: JSON
        """What the Master's dashboard shows; empty while there is none."""
        try:
            async with self.session.get(f"{self.master_url}/dashboard/data.json") as reply:
                found: Mapping[str, Any] = (await reply.json())["overview"]
                return found
        except (aiohttp.ClientError, OSError, TimeoutError):
            return {}

    async def answers(self, url: str) -> bool:
        """Whether GET `url` answers 200."""
        try:
            async with self.session.get(url) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def until(self, true: Callable[[Mapping[str, Any]], bool], wait_s: float = 60.0) -> None:
        """Returns when `true` of the overview. Raises TimeoutError, or RuntimeError when a part
        ended by itself."""
        async with asyncio.timeout(wait_s):
            while not true(await self.overview()):
                for part in self.parts:
                    part.check()
                await asyncio.sleep(LOOK_S)

    async def ready(self, count: int | None = None, wait_s: float = 120.0) -> None:
        """Returns when the frontend is ready and so many workers (default: all) are, with their
        caches known to the Master."""
        wanted = len(self.workers) if count is None else count
        await self.until(lambda overview: num_ready(overview) >= wanted, wait_s)
        async with asyncio.timeout(wait_s):
            while not await self.answers(f"{self.url}/health"):  # noqa: ASYNC110  no event tells
                await asyncio.sleep(LOOK_S)

    async def restart_master(self) -> tuple[float, float]:
        """Kills the Master and starts the next one. Returns seconds until that one answers, and
        from then until it knows every worker that runs, caches included."""
        running = sum(worker.process is not None for worker in self.workers)
        self.master.kill()
        start = time.perf_counter()
        self.master.start()
        while not await self.answers(f"{self.master_url}/live"):
            self.master.check()
            await asyncio.sleep(0.002)
        answered = time.perf_counter()
        await self.until(lambda overview: num_ready(overview) >= running)
        return answered - start, time.perf_counter() - answered


def num_ready(overview: Mapping[str, Any]) -> int:
    """Workers that may get work and whose cache's picture is whole."""
    workers = overview.get("workers", ())
    return sum(w["state"] == "ready" and w["view"]["version"] >= 0 for w in workers)


@asynccontextmanager
async def cluster(
    workers: int, *, params: Mapping[str, float], worker_flags: Sequence[str] = ()
) -> AsyncIterator[Cluster]:
    """Started and ready. params: of the simulated backend (rtp/backends/sim)."""
    folder = Path(tempfile.mkdtemp(prefix="rtp-cluster-"))
    shared = [f"--state={folder}", f"--parent={os.getpid()}", "--drain-s=1"]
    master_port, port = free_port(), free_port()
    master_url, url = (f"http://127.0.0.1:{p}" for p in (master_port, port))
    simulated = ["--backend=sim", "--threads=1", *worker_flags]
    for name, value in params.items():
        simulated += ["--set", f"params.{name}={value}"]

    def part(name: str, module: str, *flags: str) -> Part:
        return Part(name, [sys.executable, "-m", module, *shared, *flags], folder / f"{name}.log")

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        found = Cluster(
            part("master", "rtp.master", f"--port={master_port}", "--frontend=false"),
            part("frontend", "rtp.frontend", f"--port={port}", f"--master={master_url}"),
            [
                part(
                    f"w{i}", "rtp.worker", f"--worker-id=w{i}", f"--master={master_url}", *simulated
                )
                for i in range(workers)
            ],
            master_url,
            url,
            read_secret(folder / "cluster.secret", create=True),
            session,
        )
        try:
            for each in found.parts:
                each.start()
            await found.ready()
            yield found
        finally:
            for each in found.parts:
                each.kill(signal.SIGTERM)
            shutil.rmtree(folder)

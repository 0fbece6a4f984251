"""A whole cluster on loopback for tests: the entry points' own servers, real sockets, any backend.

    async with live_cluster(workers=2) as cluster:
        ... requests to cluster.url; await cluster.kill(0); await cluster.start_worker(0)

Everything runs in the test's own loop, Runners in threads; with processes=True each worker is a
`python -m rtp.worker` that can be killed -9. Both need no sleep: ready() waits for what it says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtp.config import FrontendConfig, MasterConfig, WorkerConfig
from rtp.core.commands import Note
from rtp.core.errors import RtpError
from rtp.core.steps import StepPlan
from rtp.frontend import FrontendServer
from rtp.io.frontend_loop import FrontendLoop
from rtp.io.handshake import read_secret
from rtp.io.runner_process import Broken, Done, FromRunner, Progress, RunnerSpec, execute, prepare
from rtp.master import MasterServer
from rtp.rank import load
from rtp.worker import WorkerServer, runner_spec

ROOT = Path(__file__).resolve().parent.parent.parent
QUICK = {"a": 1e-4, "b": 1e-6, "c": 0.0, "d": 2e-4, "e": 1e-5, "f": 0.0}
"""Cost of simulated steps, seconds: a token takes 0.2 ms."""


class ThreadRunner:
    """A Runner in a thread of the test's process, in place of io's RunnerProcess."""

    pid = 0

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._on_event: Callable[[FromRunner], None] = lambda event: None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    async def start(self, on_event: Callable[[FromRunner], None]) -> None:
        self._on_event = on_event
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    async def close(self) -> None:
        self._on_event = lambda event: None
        self._plans.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def break_down(self, reason: str) -> None:
        """As if the process had died."""
        self._plans.put(None)
        self._on_event(Broken(reason))

    def _serve(self) -> None:
        try:
            runner, ready = prepare(self._spec, load, lambda line: self._tell(Progress(line)))
        except RtpError as error:
            self._tell(Broken(str(error)))
            return
        self._tell(ready)
        while (plan := self._plans.get()) is not None:
            self._tell(Done(execute(runner, plan)))
        runner.close()

    def _tell(self, event: FromRunner) -> None:
        with contextlib.suppress(RuntimeError):  # the test's loop is gone
            self._loop.call_soon_threadsafe(lambda: self._on_event(event))


@dataclass
class LiveWorker:
    """One worker; exactly one of server and process is there while it runs."""

    config: WorkerConfig
    server: WorkerServer | None = None
    process: asyncio.subprocess.Process | None = None
    runners: list[ThreadRunner] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Of the control process; its Runner is its child."""
        assert self.process is not None
        return self.process.pid


class LiveCluster:
    """See the module's text."""

    def __init__(
        self, secret_file: Path, master: MasterConfig, workers: list[WorkerConfig], processes: bool
    ) -> None:
        """Where the Master serves no clients, a frontend apart does."""
        self.notes: list[Note] = []
        self.workers = [LiveWorker(config) for config in workers]
        self.master: MasterServer
        self.apart: FrontendServer | None = None
        self.secret = read_secret(secret_file, create=True)
        self._master_config = master
        self._processes = processes
        self._news = asyncio.Event()

    @property
    def url(self) -> str:
        """Where clients ask."""
        return self.apart.url if self.apart is not None else self.master.url

    @property
    def frontend(self) -> FrontendLoop:
        return self.apart.api.loop if self.apart is not None else self.master.frontend

    async def start_master(self) -> None:
        """At the start, or again on the same port with a higher term."""
        self.master = MasterServer(self._master_config, self.secret, self._note)
        await self.master.start()
        port = int(self.master.url.rpartition(":")[2])
        self._master_config = self._master_config.model_copy(update={"port": port})
        for worker in self.workers:
            worker.config = worker.config.model_copy(update={"master": self.master.url})
        if not self._master_config.frontend and self.apart is None:
            kept = {"secret_file": self._master_config.secret_file, "port": 0, "drain_s": 1.0}
            config = FrontendConfig(master=self.master.url, state=self._master_config.state, **kept)
            self.apart = FrontendServer(config, self.secret, self._note)
            await self.apart.start()

    async def start_worker(self, index: int) -> None:
        worker = self.workers[index]
        if self._processes:
            worker.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rtp.worker", f"--parent={os.getpid()}"),
                *_flags(worker.config),
                cwd=ROOT,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=None if "RTP_TEST_LOGS" in os.environ else asyncio.subprocess.DEVNULL,
                env={k: v for k, v in os.environ.items() if not k.startswith("RTP_")},
                start_new_session=True,
            )
            return
        worker.runners = [ThreadRunner(runner_spec(worker.config)) for _ in range(worker.config.dp)]
        worker.server = WorkerServer(worker.config, self.secret, self._note)
        await worker.server.start(worker.runners)

    async def kill(self, index: int) -> None:
        """kill -9 of a process; in the test's process, sockets closed with no word."""
        worker = self.workers[index]
        if worker.process is not None:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
            await worker.process.wait()
            worker.process = None
        if worker.server is not None:
            server, worker.server = worker.server, None
            await server.stop()

    async def stop_master(self) -> None:
        """As when it is killed: connections close, workers and clients find out."""
        await self.master.stop()

    async def ready(self, count: int | None = None) -> None:
        """Returns when so many workers (default: all) can take requests, and a model is served."""
        count = len(self.workers) if count is None else count
        async with asyncio.timeout(60):
            while self.num_ready() < count or (count and not self._offered()):
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    # A worker becomes ready by a Status, of which no Note tells.
                    await asyncio.wait_for(self._news.wait(), 0.02)

    async def noted(self, wanted: Callable[[Note], bool]) -> Note:
        """The first Note like this, once there is one; fails after ten seconds."""
        async with asyncio.timeout(10):
            while not (found := [note for note in self.notes if wanted(note)]):
                self._news.clear()
                await self._news.wait()
        return found[0]

    def num_ready(self) -> int:
        return sum(w["state"] == "ready" for w in self.master.overview()["workers"])

    def _offered(self) -> bool:
        return self.apart.ready() if self.apart is not None else bool(self.frontend.models)

    async def close(self) -> None:
        if self.apart is not None:
            await self.apart.stop()
        for index in range(len(self.workers)):
            await self.kill(index)
        await self.master.stop()

    def _note(self, note: Note) -> None:
        self.notes.append(note)
        self._news.set()


@asynccontextmanager
async def live_cluster(
    workers: int = 2,
    backend: str = "sim",
    *,
    model: str = "sim",
    processes: bool = False,
    master: dict[str, Any] | None = None,
    worker: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
    roles: Sequence[str] = (),
    start: bool = True,
) -> AsyncIterator[LiveCluster]:
    """master, worker: fields of their settings.  params: of the backend; sim is QUICK by default.
    roles: of the workers, if they are not to be fused.
    start=False: nothing runs yet, the test starts what it wants."""
    params = (QUICK if backend == "sim" else {}) if params is None else params
    with tempfile.TemporaryDirectory() as directory:
        secret_file = Path(directory) / "secret"
        kept = {"secret_file": secret_file, "state": directory, "drain_s": 1.0}
        master_config = MasterConfig(**{"port": 0, **kept, **(master or {})})
        configs = [
            WorkerConfig(
                **{
                    "backend": backend,
                    "model": model,
                    "worker_id": f"worker-{i}",
                    "params": params,
                    "threads": 1,
                    **kept,
                    **({"role": roles[i]} if roles else {}),
                    **(worker or {}),
                }
            )
            for i in range(workers)
        ]
        cluster = LiveCluster(secret_file, master_config, configs, processes)
        if start:
            await cluster.start_master()
            await asyncio.gather(*(cluster.start_worker(i) for i in range(workers)))
        try:
            if start:
                await cluster.ready()
            yield cluster
        finally:
            if hasattr(cluster, "master"):
                await cluster.close()
        faults = [note.fields for note in cluster.notes if note.event == "core.failed"]
        assert not faults, faults


def _flags(config: WorkerConfig) -> list[str]:
    from rtp.settings import leaves, to_flags

    names = [path[0] for path, _ in leaves(WorkerConfig)]
    return to_flags(config, [*dict.fromkeys(names), "params"])

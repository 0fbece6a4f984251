"""`python -m rtp.worker`: one worker, as a control process and a process per rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from rtp.config import Model, WorkerConfig
from rtp.core.commands import Note
from rtp.core.errors import ConfigError, RtpError
from rtp.core.messages import Register
from rtp.core.ports import Transport
from rtp.core.types import WorkerId
from rtp.core.worker.worker import Worker
from rtp.io import addresses, logs
from rtp.io.clock import LoopWatch
from rtp.io.handshake import key_id, read_secret
from rtp.io.http_server import Runner
from rtp.io.ratchet import next_number
from rtp.io.registration import keep_registered
from rtp.io.runner_process import (
    Broken,
    FromRunner,
    Progress,
    Ready,
    RunnerHandle,
    RunnerProcess,
    RunnerSpec,
    die_with,
)
from rtp.io.worker_http import make_worker_app
from rtp.io.worker_loop import WorkerLoop
from rtp.profiling import thorough, write_profile
from rtp.serving import listen, until_signal
from rtp.settings import from_command_line
from rtp.transports import transfer, transport_of


class WorkerServer:
    """A running worker: start(), then stopped (an event) or failed (a reason), then stop()."""

    def __init__(
        self, config: WorkerConfig, secret: bytes, on_note: Callable[[Note], None]
    ) -> None:
        self.failed = ""
        self.stopped = asyncio.Event()
        """Set when the worker has to end: a Runner is gone."""
        self.loop: WorkerLoop | None = None
        self.address = ""
        self._config = config
        self._secret = secret
        self._on_note = on_note
        self._transport_name = ""
        self._transport: Transport | None = None
        self._listener: socket.socket | None = None
        self._ranks: list[_Rank] = []
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._registering: asyncio.Task[None] | None = None
        self._watch: LoopWatch | None = None

    async def start(self, runners: Sequence[RunnerHandle]) -> None:
        """Loads the model on every rank, then serves and registers. Raises RtpError when it
        cannot."""
        config = self._config
        self._transport_name, self._transport = transport_of(config)
        self._listener = listen(config.host, config.port)
        port = self._listener.getsockname()[1]
        self.address = addresses.normal(config.advertise or addresses.join(config.host, port))
        self._ranks = [_Rank(runner, self._progress) for runner in runners]
        await asyncio.gather(*(rank.start() for rank in self._ranks))
        ready = [rank.ready.result() for rank in self._ranks]
        register = self._register(ready)
        self._on_note(Note("model.loaded", {"model": register.model, "ranks": register.ranks}))
        core = Worker(
            register,
            [r.capacity for r in ready],
            max_batch_tokens=config.max_batch_tokens,
            chunk_while_decoding=config.chunk_while_decoding,
            max_rows=config.max_rows,
            steps_in_flight=config.steps_in_flight,
            ticket_key=secrets.token_bytes(32),
        )
        loop = WorkerLoop(core, register, runners, self._on_note, self._fail, self._transport)
        self.loop = loop
        for index, rank in enumerate(self._ranks):
            rank.hand_over(partial(loop.runner_event, index))
        self._watch = LoopWatch(loop.driver.times)
        app = make_worker_app(loop, ready[0].card, self._secret, os.environ.get("RTP_ADMIN_KEY"))
        # Nothing runs behind a connection that outlives the loop's close().
        self._runner = Runner(app, access_log=None, keepalive_timeout=75.0, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()
        self._session = aiohttp.ClientSession()
        self._registering = asyncio.create_task(
            keep_registered(
                self._session,
                master=config.master,
                register=register,
                secret=self._secret,
                unlinked=loop.unlinked,
                on_change=self._registered,
            )
        )

    def _registered(self, trouble: str) -> None:
        note = Note("registration.accepted", {"master": self._config.master})
        if trouble:
            note = Note("registration.failed", {"reason": trouble, "next": "will retry"})
        self._on_note(note)

    def settle(self) -> None:
        """Takes what exists now out of the garbage collector's sight; for a process of its own."""
        if self._watch is not None:
            self._watch.settle()

    async def drain(self) -> None:
        """Lets what runs finish, for the configured time."""
        if self.loop is None:
            return
        self.loop.drain(self._config.drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s + 1.0):
                await self.loop.drained.wait()

    async def stop(self) -> None:
        """Closes everything, Runners included."""
        if self._registering is not None:
            self._registering.cancel()
        if self._session is not None:
            await self._session.close()
        if self._watch is not None:
            self._watch.close()
        if self.loop is not None:
            await self.loop.close()
        else:
            await asyncio.gather(*(rank.runner.close() for rank in self._ranks))
        if self._runner is not None:
            await self._runner.cleanup()
        if self._listener is not None:
            self._listener.close()

    def _register(self, ready: Sequence[Ready]) -> Register:
        config, first = self._config, ready[0]
        if len({r.capacity.kv_format for r in ready}) > 1:
            raise ConfigError("the ranks loaded different models")
        return Register(
            worker_id=WorkerId(config.worker_id or self.address),
            epoch=self._epoch(),
            address=self.address,
            role=config.role,
            ranks=len(ready),
            kv_total=tuple(r.capacity.num_blocks * r.capacity.block_size for r in ready),
            block_size=first.capacity.block_size,
            model=first.card.model,
            max_model_len=first.capacity.max_model_len,
            card=first.card.digest(),
            kv_format=first.capacity.kv_format,
            key_id=key_id(self._secret),
            max_batch_tokens=config.max_batch_tokens,
            profile=first.profile,
            prefix_closed=True,
            hardware=first.hardware,
            max_rows=config.max_rows,
            lockstep=config.lockstep,
            transports=(self._transport_name,) if self._transport is not None else (),
            transfer=transfer(self._transport),
        )

    def _epoch(self) -> int:
        """Higher than those of this worker's earlier lives; all workers of a state directory count
        together."""
        epoch, reason = next_number(self._config.state / "epoch")
        if reason:
            self._on_note(Note("epoch.not_kept", {"epoch": epoch, "reason": reason}))
        return epoch

    def _progress(self, line: str) -> None:
        self._on_note(Note("model.loading", {"step": line}))
        if self._config.parent:
            print(line, flush=True)  # for the supervisor, which shows it

    def _fail(self, reason: str) -> None:
        self.failed = reason
        self.stopped.set()


class _Rank:
    """One Runner while it starts; afterwards its events go to the loop."""

    def __init__(self, runner: RunnerHandle, progress: Callable[[str], None]) -> None:
        self.runner = runner
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._progress = progress
        self._next: Callable[[FromRunner], None] | None = None

    async def start(self) -> None:
        await self.runner.start(self._on_event)
        await self.ready

    def hand_over(self, on_event: Callable[[FromRunner], None]) -> None:
        self._next = on_event

    def _on_event(self, event: FromRunner) -> None:
        if self._next is not None:
            self._next(event)
        elif isinstance(event, Progress):
            self._progress(event.line)
        elif isinstance(event, Ready) and not self.ready.done():
            self.ready.set_result(event)
        elif isinstance(event, Broken) and not self.ready.done():
            self.ready.set_exception(RtpError(event.reason))


def runner_spec(config: Model) -> RunnerSpec:
    """What a rank has to build. Settings left at their default are left to the backend."""
    params: dict[str, Any] = {"block_size": config.block_size}  # Any: each backend's own
    if config.dtype != "auto":
        params["dtype"] = config.dtype
    if config.kv_tokens is not None:
        params["num_blocks"] = max(1, config.kv_tokens // config.block_size)
    if config.max_model_len is not None:
        params["max_model_len"] = config.max_model_len
    return RunnerSpec(
        backend=config.backend,
        model=config.model,
        served_name=config.served_name,
        params=params | config.params,
        max_batch_tokens=config.max_batch_tokens,
    )


async def serve(config: WorkerConfig) -> int:
    """Runs until a signal (0) or a failure (1)."""
    secret = read_secret(config.secret_path, create=config.secret_file is None)
    server = WorkerServer(
        config,
        secret,
        logs.note_logger(**({"worker": config.worker_id} if config.worker_id else {})),
    )
    ended = asyncio.Event()
    until_signal(ended)
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.dp)
    if config.profile is not None:
        spec = thorough(runner_spec(config))
        runner = RunnerProcess(spec, threads=threads)
        await write_profile(runner, spec, config.profile, threads, lambda line: print(line))
        print(f"{config.profile}: written")
        return 0
    runners = [RunnerProcess(runner_spec(config), threads=threads) for _ in range(config.dp)]
    starting = asyncio.create_task(server.start(runners))
    waits = {asyncio.create_task(ended.wait()), asyncio.create_task(server.stopped.wait())}
    try:
        await asyncio.wait({starting, *waits}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            server.settle()
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not server.stopped.is_set():
                await server.drain()
        else:
            starting.cancel()
    finally:
        for task in waits:
            task.cancel()
        await server.stop()
    if server.failed:
        print(f"rtp.worker: {server.failed}", file=sys.stderr)
    return 1 if server.failed else 0


def main() -> None:
    config = from_command_line(WorkerConfig)
    if config.parent:
        die_with(config.parent)
    logs.setup(config.log_level)
    try:
        code = uvloop.run(serve(config))
    except RtpError as error:
        print(f"rtp.worker: {error}", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    # Not sys.exit: a thread of a library must not keep a failed worker alive.
    os._exit(code)


if __name__ == "__main__":
    main()

"""`python -m rtp.local --workers 2`: a Master and its workers on this machine, kept running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any

import aiohttp
import uvloop

from rtp.config import LocalConfig
from rtp.core.errors import RtpError
from rtp.example import Example, first_key, has_chat_template
from rtp.io import addresses
from rtp.io.handshake import read_secret
from rtp.io.runner_process import die_with
from rtp.progress import Progress
from rtp.serving import listen
from rtp.settings import from_command_line, to_flags
from rtp.supervisor import Child

LOOK_S = 0.1
LOOK_AGAIN_S = 0.5
OFFERED_S = 15.0
"""A model that is not offered by then has a trouble that the example will tell of."""
KILL_AFTER_S = 3.0
PUBLIC_FIELDS = ("host", "api_key_file", "max_body_bytes")
MASTER_FIELDS = (
    *(*PUBLIC_FIELDS, "routing"),
    *("max_queue_requests", "max_queue_tokens", "max_ttft_s", "limits"),
    *("default_tenant", "tenants"),
)
MODEL_FIELDS = (
    *("model", "served_name", "backend", "dtype", "block_size", "kv_tokens", "max_model_len"),
    *("max_batch_tokens", "chunk_while_decoding", "max_rows", "steps_in_flight", "params"),
)


class Local:
    """Master and workers as children of this process."""

    def __init__(self, config: LocalConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._failed = asyncio.Event()
        self._reason = ""
        self._lives: dict[str, int] = {}
        with listen(config.host, config.port) as probe:  # in use: say so before anything starts
            port = probe.getsockname()[1]
        self.url = f"http://{addresses.join(config.own_host, port)}"
        self.logs = config.state / "logs" / str(port)
        self.logs.mkdir(parents=True, exist_ok=True)
        read_secret(config.secret_path, create=config.secret_file is None)
        shared = [f"--secret-file={config.secret_path}", f"--state={config.state}"]
        shared += [f"--log-level={config.log_level}", f"--drain-s={config.drain_s}"]
        flags = [*shared, f"--port={port}", *to_flags(config, MASTER_FIELDS)]
        self._master = self._child("master", flags)
        cores = len(os.sched_getaffinity(0))
        threads = config.threads or max(1, cores // config.workers)
        flags = [*shared, f"--master={self.url}", f"--threads={threads}"]
        flags += to_flags(config, MODEL_FIELDS)
        self._workers = [
            self._child(
                "worker", [*flags, f"--worker-id=worker-{i}", f"--role={role}"], f"worker-{i}"
            )
            for i, role in enumerate(config.roles)
        ]
        self._frontends: dict[str, Child] = {}
        for i in range(config.frontends):
            with listen(config.host, port + 1 + i):
                pass  # in use: as above
            flags = [*shared, f"--master={self.url}", f"--port={port + 1 + i}"]
            child = self._child(
                "frontend", [*flags, *to_flags(config, PUBLIC_FIELDS)], f"frontend-{i}"
            )
            self._frontends[f"http://{addresses.join(config.own_host, port + 1 + i)}"] = child
        self._children = [self._master, *self._workers, *self._frontends.values()]

    @property
    def frontend_urls(self) -> list[str]:
        return list(self._frontends)

    async def ready(self) -> dict[str, Any]:  # Any: JSON
        """Waits until every worker and frontend is ready; returns the overview. Raises RtpError if
        a child ends."""
        async with aiohttp.ClientSession() as session:
            while not self._failed.is_set():
                overview = await self._overview(session)
                self._note_ready(overview)
                await self._look_at_frontends(session)
                if all(child.well for child in self._children):
                    return overview
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._failed.wait(), LOOK_S)
        raise RtpError(self._reason)

    async def watch(self) -> None:
        """Says when a child that was started again is ready; until cancelled."""
        async with aiohttp.ClientSession() as session:
            while True:
                await asyncio.sleep(LOOK_AGAIN_S)
                if any(child.restarting for child in self._children):
                    self._note_ready(await self._overview(session))
                    await self._look_at_frontends(session)

    def _note_ready(self, overview: dict[str, Any]) -> None:  # Any: JSON
        """A child is known by its life, so that one that has just ended is not taken for ready."""
        ready = {w["worker_id"]: w["epoch"] for w in overview.get("workers", ()) if _is_ready(w)}
        lives = ready | ({"master": overview["term"]} if overview else {})
        for child in (self._master, *self._workers):
            life = lives.get(child.name)
            if life is None or life == self._lives.get(child.name):
                continue
            if child is not self._master or child.restarting:
                self._progress.line(child.name, "ready again" if child.well else "ready")
            self._lives[child.name] = life
            child.well, child.restarting = True, False

    async def _look_at_frontends(self, session: aiohttp.ClientSession) -> None:
        """A frontend is ready when it has met the Master and a model."""
        for url, child in self._frontends.items():
            if child.well and not child.restarting:
                continue
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        self._progress.line(child.name, "ready again" if child.well else "ready")
                        child.well, child.restarting = True, False

    async def failed(self) -> str:
        """Returns why this cannot go on, once it cannot."""
        await self._failed.wait()
        return self._reason

    async def stop(self) -> None:
        """Ends all children, by force if they take longer than they are given."""
        for child in self._children:
            child.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._config.drain_s + KILL_AFTER_S):
                await asyncio.gather(*(child.ended() for child in self._children))
        except TimeoutError:
            self.kill()
            await asyncio.gather(*(child.ended() for child in self._children))

    def kill(self) -> None:
        for child in self._children:
            child.signal(signal.SIGKILL)

    def _child(self, module: str, flags: list[str], name: str = "") -> Child:
        name = name or module
        log = self.logs / f"{name}.log"
        log.unlink(missing_ok=True)
        return Child(name, f"rtp.{module}", flags, log, self._progress.line, self._on_failed)

    def _on_failed(self, name: str, reason: str) -> None:
        log = next(c.log for c in self._children if c.name == name)
        self._reason = self._reason or f"{name} did not start: {reason}\n  its log: {log}"
        self._failed.set()

    async def _overview(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        try:
            async with session.get(f"{self.url}/dashboard/data.json") as answer:
                found: dict[str, Any] = (await answer.json())["overview"]
                return found
        except (aiohttp.ClientError, OSError):
            return {}


def _is_ready(worker: dict[str, Any]) -> bool:  # Any: JSON
    return bool(worker["state"] == "ready")


async def greet(local: Local, config: LocalConfig, progress: Progress) -> None:
    """What a person sees when all is ready: a proof that it works, and how to go on; and from then
    on, what becomes of children that ended."""
    models = sorted({w["model"] for w in (await local.ready())["workers"]})
    progress.close()
    key = first_key(config.api_key_file)
    count = "1 worker" if config.workers == 1 else f"{config.workers} workers"
    chat = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(OFFERED_S):
            chat = await has_chat_template(local.url, models[0], key)
    example = Example(local.url, models[0], key, chat)
    print(f"\nrtp is ready on {local.url}: {', '.join(models)} on {count}\n")
    if not chat:
        print("  It has no chat template: /v1/completions continues text.\n")
    if config.ask:
        print(f"  > {example.text}")
        try:
            print(f"  {await example.ask()}\n")
        except (aiohttp.ClientError, TimeoutError) as error:
            print(f"  (no answer: {error!r})\n")
    print(f"Ask it yourself:\n  {example.curl()}")
    for url in local.frontend_urls:
        print(f"Frontend of its own: {url}")
    print(f"Dashboard: {local.url}/dashboard\nLogs: {local.logs}\nStop: Ctrl-C", flush=True)
    await local.watch()


async def serve(config: LocalConfig) -> int:
    """Runs until a signal (0) or until a child cannot be started (1)."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    progress = Progress()
    local = Local(config, progress)

    def at_once() -> None:
        local.kill()
        os._exit(130)

    greeting = asyncio.create_task(greet(local, config, progress))
    waits = [asyncio.create_task(ended.wait()), asyncio.create_task(local.failed())]
    try:
        await asyncio.wait({greeting, *waits}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        progress.close()
        loop.add_signal_handler(signal.SIGINT, at_once)
        for task in (greeting, *waits):
            if not task.done():
                task.cancel()
        failure = waits[1].result() if waits[1].done() and not waits[1].cancelled() else ""
        ends = await asyncio.gather(greeting, *waits, return_exceptions=True)
        if isinstance(ends[0], Exception):
            failure = failure or repr(ends[0])
        if not failure:
            print("\nstopping ...", flush=True)
        await local.stop()
    if failure:
        print(f"rtp.local: {failure}", file=sys.stderr)
    return 1 if failure else 0


def main() -> None:
    config = from_command_line(LocalConfig)
    if config.parent:
        die_with(config.parent)
    try:
        code = uvloop.run(serve(config))
    except RtpError as error:
        print(f"rtp.local: {error}", file=sys.stderr)
        code = 1
    raise SystemExit(code)


if __name__ == "__main__":
    main()

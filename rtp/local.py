"""`python -m rtp.local --workers 2`: a Master and its workers on this machine, kept running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from rtp.config import LocalConfig
from rtp.core.errors import RtpError
from rtp.io import addresses
from rtp.io.handshake import read_secret
from rtp.io.runner_process import die_with
from rtp.master import read_keys
from rtp.progress import Progress
from rtp.serving import listen
from rtp.settings import from_command_line, to_flags
from rtp.supervisor import Child

QUESTION = "What is the capital of France?"
LOOK_S = 0.1
KILL_AFTER_S = 3.0
MASTER_FIELDS = (
    *("host", "api_key_file", "max_body_bytes", "routing"),
    *("max_queue_requests", "max_queue_tokens", "max_ttft_s"),
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
            self._child("worker", [*flags, f"--worker-id=worker-{i}"], f"worker-{i}")
            for i in range(config.workers)
        ]

    async def ready(self) -> dict[str, Any]:  # Any: JSON
        """Waits until every worker is ready; returns the overview. Raises RtpError if a child
        ends."""
        async with aiohttp.ClientSession() as session:
            while not self._failed.is_set():
                overview = await self._overview(session)
                ready = [w for w in overview.get("workers", ()) if w["state"] == "ready"]
                self._master.well = self._master.well or bool(overview)
                for worker in self._workers:
                    if not worker.well and any(w["worker_id"] == worker.name for w in ready):
                        worker.well = True
                        self._progress.line(worker.name, "ready")
                if len(ready) == len(self._workers):
                    return overview
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._failed.wait(), LOOK_S)
        raise RtpError(self._reason)

    async def failed(self) -> str:
        """Returns why this cannot go on, once it cannot."""
        await self._failed.wait()
        return self._reason

    async def stop(self) -> None:
        """Ends all children, by force if they take longer than they are given."""
        children = [*self._workers, self._master]
        for child in children:
            child.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._config.drain_s + KILL_AFTER_S):
                await asyncio.gather(*(child.ended() for child in children))
        except TimeoutError:
            self.kill()
            await asyncio.gather(*(child.ended() for child in children))

    def kill(self) -> None:
        for child in [*self._workers, self._master]:
            child.signal(signal.SIGKILL)

    def _child(self, module: str, flags: list[str], name: str = "") -> Child:
        name = name or module
        log = self.logs / f"{name}.log"
        log.unlink(missing_ok=True)
        return Child(name, f"rtp.{module}", flags, log, self._progress.line, self._on_failed)

    def _on_failed(self, name: str, reason: str) -> None:
        log = next(c.log for c in [*self._workers, self._master] if c.name == name)
        self._reason = self._reason or f"{name} did not start: {reason}\n  its log: {log}"
        self._failed.set()

    async def _overview(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        try:
            async with session.get(f"{self.url}/dashboard/data.json") as answer:
                found: dict[str, Any] = (await answer.json())["overview"]
                return found
        except (aiohttp.ClientError, OSError):
            return {}


def example(model: str) -> dict[str, Any]:  # Any: JSON
    """The body of the example request, greedy: everybody gets the same answer."""
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 48}


async def ask(url: str, model: str, key: str) -> str:
    """The model's answer to the example question."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        session.post(
            f"{url}/v1/chat/completions",
            json=example(model),
            headers=headers,
        ) as answer,
    ):
        found = await answer.json()
    if "error" in found:
        return f"(no answer: {found['error']['message']})"
    return str(found["choices"][0]["message"]["content"]).strip()


def curl(url: str, model: str, key: str) -> str:
    """A line to paste into a shell."""
    words = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if key:
        words += ["-H", f"Authorization: Bearer {key}"]
    return shlex.join([*words, "-d", json.dumps(example(model))])


def first_key(path: Path | None) -> str:
    """The API key for our own question; '' where none is needed."""
    keys = [os.environ.get("RTP_API_KEY", ""), *(read_keys(path) if path else ())]
    return next(filter(None, keys), "")


async def greet(local: Local, config: LocalConfig, progress: Progress) -> None:
    """What a person sees when all is ready: a proof that it works, and how to go on."""
    models = sorted({w["model"] for w in (await local.ready())["workers"]})
    progress.close()
    key = first_key(config.api_key_file)
    count = "1 worker" if config.workers == 1 else f"{config.workers} workers"
    print(f"\nrtp is ready on {local.url}: {', '.join(models)} on {count}\n")
    if config.ask:
        print(f"  > {QUESTION}")
        try:
            print(f"  {await ask(local.url, models[0], key)}\n")
        except (aiohttp.ClientError, TimeoutError) as error:
            print(f"  (no answer: {error!r})\n")
    print(f"Ask it yourself:\n  {curl(local.url, models[0], key)}")
    print(f"Dashboard: {local.url}/dashboard\nLogs: {local.logs}\nStop: Ctrl-C", flush=True)


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
        if greeting.done() and not greeting.exception():
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        progress.close()
        loop.add_signal_handler(signal.SIGINT, at_once)
        for task in (greeting, *waits):
            if not task.done():
                task.cancel()
        failure = waits[1].result() if waits[1].done() and not waits[1].cancelled() else ""
        await asyncio.gather(greeting, *waits, return_exceptions=True)
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

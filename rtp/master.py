"""`python -m rtp.master`: the Master, and in the same process a frontend with the HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from rtp.config import MasterConfig
from rtp.core import plugins
from rtp.core.card import ModelCard
from rtp.core.commands import Note
from rtp.core.errors import ConfigError, RtpError
from rtp.core.frontend.frontend import Frontend
from rtp.core.master.master import Master
from rtp.core.messages import Ask, Cancel
from rtp.core.ports import Detokenizer
from rtp.core.types import FrontendId, RequestId
from rtp.io import addresses, logs
from rtp.io.clock import LoopWatch, now
from rtp.io.frontend_loop import FrontendLoop
from rtp.io.handshake import read_secret
from rtp.io.http_frontend import make_app
from rtp.io.http_server import make_runner
from rtp.io.master_loop import MasterLoop
from rtp.io.metrics import Metrics
from rtp.io.ratchet import next_number
from rtp.io.runner_process import die_with
from rtp.io.tokenizer import Tokenizer
from rtp.serving import listen, until_signal
from rtp.settings import from_command_line

LAST_WORDS_S = 2.0


class MasterServer:
    """A running Master: start(), then stop()."""

    def __init__(
        self,
        config: MasterConfig,
        secret: bytes,
        on_note: Callable[[Note], None],
        term: int | None = None,
    ) -> None:
        """term: for tests; else one that is higher than those of earlier Masters."""
        self.metrics = Metrics()
        self.url = ""
        self._config = config
        self._log = on_note
        if term is None:
            term, reason = next_number(config.state / "term")
            if reason:
                self._on_note(Note("term.not_kept", {"term": term, "reason": reason}))
        self._tokenizers: dict[str, Tokenizer] = {}
        routing = plugins.build("routing", config.routing.name, **config.routing.params)
        self._core = Master(
            term,
            routing,
            max_queue_requests=config.max_queue_requests,
            max_queue_tokens=config.max_queue_tokens,
            ttft_limit_s=config.max_ttft_s,
        )
        self.loop = MasterLoop(
            self._core, secret=secret, term=term, on_card=self._on_card, on_note=self._on_note
        )
        frontend_id = FrontendId(f"frontend-{secrets.token_hex(4)}")
        self._requests = Frontend(frontend_id, self._detokenizer)
        self.frontend = FrontendLoop(
            self._requests,
            frontend_id=frontend_id,
            secret=secret,
            to_master=self._to_master,
            on_note=self._on_note,
        )
        self._listener = listen(config.host, config.port)
        app = make_app(
            self.frontend,
            codec_of=lambda card: self._tokenizer(card.model),
            overview=self.overview,
            placement=lambda request_id: self._core.placement(RequestId(request_id)),
            metrics=self.metrics,
            secret=secret,
            api_key=os.environ.get("RTP_API_KEY"),
            admin_key=os.environ.get("RTP_ADMIN_KEY"),
            tenants=read_keys(config.api_key_file) if config.api_key_file else None,
            max_body_bytes=config.max_body_bytes,
        )
        app.add_routes(self.loop.routes())
        self._runner = make_runner(app)
        self._watch = LoopWatch(self.loop.driver.times)
        self.metrics.watch(loop=self.loop.driver.times)

    async def start(self) -> None:
        """Serves; workers may come from now on."""
        self.loop.join(self.frontend)
        await self.loop.start([addresses.normal(address) for address in self._config.workers])
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{addresses.join(host, port)}"
        self._on_note(Note("master.started", {"url": self.url, "term": self.loop.term}))

    def settle(self) -> None:
        """Takes what exists now out of the garbage collector's sight; for a process of its own."""
        self._watch.settle()

    async def drain(self) -> None:
        """Lets open requests end, for the configured time; nothing new is taken."""
        for site in list(self._runner.sites):
            await site.stop()
        await self.frontend.drain(self._config.drain_s)

    async def stop(self) -> None:
        """Closes everything; a client that does not read its end is not waited for."""
        self._watch.close()
        await self.frontend.drain(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._runner.cleanup()
        self.frontend.close()
        await self.loop.close()
        self._listener.close()

    def overview(self) -> dict[str, Any]:  # Any: JSON
        """The core's picture as the dashboard wants it: lists, and "ready" for a usable worker."""
        facts: dict[str, Any] = dict(self._core.overview(now()))
        workers = []
        for worker_id, worker in sorted(facts["workers"].items()):
            ready = worker["state"] == "live" and not worker["draining"]
            ranks = [{"rank": i, **rank} for i, rank in enumerate(worker["ranks"])]
            state = "ready" if ready else worker["state"]
            workers.append({**worker, "worker_id": worker_id, "state": state, "ranks": ranks})
        facts["workers"] = workers
        facts["waiting"] = facts["queue"]["requests"]
        facts["frontend"] = dataclasses.asdict(self._requests.counters)
        facts["loop"] = self.loop.driver.times.as_dict()
        return facts

    def _on_card(self, card: ModelCard) -> None:
        """The tokenizer is built before the model is offered: a first request must not wait for
        it."""
        if card.model not in self._tokenizers:
            try:
                self._tokenizers[card.model] = Tokenizer(card)
            except ConfigError as error:
                self._on_note(Note("card.failed", {"model": card.model, "reason": str(error)}))
                return
        self.frontend.add_model(card)

    def _tokenizer(self, model: str) -> Tokenizer:
        return self._tokenizers[model]

    def _detokenizer(self, model: str, skip_special_tokens: bool) -> Detokenizer:
        return self._tokenizers[model].detokenizer(skip_special_tokens)

    def _to_master(self, message: Ask | Cancel) -> None:
        self.loop.from_frontend(self.frontend.frontend_id, message)

    def _on_note(self, note: Note) -> None:
        self._log(note)
        self.metrics.note(note.event, note.fields)


def read_keys(path: Path) -> dict[str, str]:
    """Key -> tenant of a file with lines `KEY` or `KEY TENANT`; blank ones and # comments are
    skipped. Raises ConfigError."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path}: {error}") from None
    lines = [line for line in lines if line and not line[0].startswith("#")]
    if not lines or any(len(line) > 2 for line in lines):
        raise ConfigError(f"api_key_file {path}: want lines of a key and, optionally, a tenant")
    return {line[0]: line[1] if len(line) == 2 else "" for line in lines}


async def serve(config: MasterConfig) -> None:
    """Runs until a signal."""
    secret = read_secret(config.secret_path, create=config.secret_file is None)
    server = MasterServer(config, secret, logs.note_logger())
    ended = asyncio.Event()
    until_signal(ended)
    try:
        await server.start()
        server.settle()
        await ended.wait()
        await server.drain()
    finally:
        await server.stop()


def main() -> None:
    config = from_command_line(MasterConfig)
    if config.parent:
        die_with(config.parent)
    logs.setup(config.log_level)
    try:
        uvloop.run(serve(config))
    except RtpError as error:
        print(f"rtp.master: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()

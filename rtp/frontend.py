"""`python -m rtp.frontend`: the HTTP API in a process of its own, for a Master elsewhere.

It keeps nothing: models and their cards come from the Master, requests live as long as their
connections. Streams run on while the Master is away, new requests wait for it until their deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from aiohttp import web

from rtp.api import Api
from rtp.config import FrontendConfig
from rtp.core.commands import Note
from rtp.io import addresses
from rtp.io.clock import LoopWatch
from rtp.io.errors_http import master_away
from rtp.io.http_server import make_runner
from rtp.io.master_client import MasterClient
from rtp.io.metrics import Metrics
from rtp.io.model_offers import ModelWatch
from rtp.io.reminder import Reminder
from rtp.serving import listen, run
from rtp.settings import from_command_line

LAST_WORDS_S = 2.0


class FrontendServer:
    """A running frontend: start(), then stop(). Build inside the running loop."""

    def __init__(
        self, config: FrontendConfig, secret: bytes, on_note: Callable[[Note], None]
    ) -> None:
        self.metrics = Metrics()
        self.url = ""
        self._config = config
        self._secret = secret
        self._log = on_note
        self._reminder = Reminder()
        self._master = addresses.normal(config.master)
        self.api = Api(
            config,
            secret,
            metrics=self.metrics,
            to_master=lambda message: self.client.send(message),
            on_note=self._on_note,
        )
        self.client = MasterClient(
            self._master,
            secret=secret,
            frontend_id=self.api.loop.frontend_id,
            on_up=self._master_up,
            on_down=self._master_down,
            on_message=self.api.loop.from_master,
            on_trouble=partial(self._trouble, "master.unreachable"),
        )
        self._models: ModelWatch | None = None
        self._listener = listen(config.host, config.port)
        self._runner = make_runner(self.api.app(ready=self._ready_or_why))
        self._watch = LoopWatch(self.api.loop.driver.times)
        self.metrics.watch(loop=self.api.loop.driver.times, master=lambda: self.client.connected)

    def ready(self) -> bool:
        """The Master is there and has a model that can be served."""
        return self.client.connected and self._models is not None and bool(self._models.ready)

    async def start(self) -> None:
        """Serves; the Master may be there or come."""
        self.client.start()
        self._models = ModelWatch(
            self._master,
            secret=self._secret,
            on_card=partial(self.api.offer, replace=True),
            on_trouble=partial(self._trouble, "models.unknown"),
        )
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{addresses.join(host, port)}"
        facts: dict[str, object] = {"url": self.url, "master": self._master}
        self._on_note(Note("frontend.started", facts))

    def settle(self) -> None:
        """Takes what exists now out of the garbage collector's sight; for a process of its own."""
        self._watch.settle()

    async def drain(self) -> None:
        """Lets open requests end, for the configured time; nothing new is taken."""
        for site in list(self._runner.sites):
            await site.stop()
        await self.api.loop.drain(self._config.drain_s)

    async def stop(self) -> None:
        """Closes everything; a client that does not read its end is not waited for."""
        self._watch.close()
        await self.api.loop.drain(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._runner.cleanup()
        if self._models is not None:
            await self._models.close()
        await self.client.close()
        self.api.loop.close()
        self._listener.close()

    def _master_up(self, term: int) -> None:
        self._reminder.over()
        self._on_note(Note("master.joined", {"master": self._master, "term": term}))
        self.api.loop.master_up(term)
        if self._models is not None:
            self._models.wake()

    def _master_down(self) -> None:
        self._on_note(Note("master.lost", {"master": self._master}))
        self.api.loop.master_down()

    def _ready_or_why(self) -> bool:
        """As ready(), for /health: raises ApiError where it is the Master that is missing."""
        if not self.client.connected:
            raise master_away()
        return self.ready()

    def _trouble(self, event: str, reason: str) -> None:
        if self._reminder.due(f"{event} {reason}"):
            self._on_note(Note(event, {"reason": reason, "next": "will retry"}))

    def _on_note(self, note: Note) -> None:
        self._log(note)
        self.metrics.note(note.event, note.fields)


def main() -> None:
    run("rtp.frontend", from_command_line(FrontendConfig), FrontendServer)


if __name__ == "__main__":
    main()

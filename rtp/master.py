"""`python -m rtp.master`: the Master, and in the same process a frontend with the HTTP API, unless
all frontends are to be apart (rtp.frontend)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

from aiohttp import web

from rtp.api import Api
from rtp.config import MOST_TENANTS, MasterConfig
from rtp.core import plugins
from rtp.core.commands import Note
from rtp.core.events import From, LinkDown
from rtp.core.master.master import Master
from rtp.core.master.tenants import Tenants
from rtp.core.messages import Ask, Cancel
from rtp.core.types import FrontendId, RequestId
from rtp.io import addresses
from rtp.io.clock import LoopWatch, now
from rtp.io.http_schedule import STEMS
from rtp.io.http_server import HotRoutes, make_runner
from rtp.io.master_loop import MasterLoop
from rtp.io.metrics import Metrics
from rtp.io.policy_watch import Watched
from rtp.io.ratchet import next_number
from rtp.io.schedule_desk import Desk
from rtp.serving import listen, run
from rtp.settings import from_command_line

LAST_WORDS_S = 2.0
WORKERS_RETURN_S = 5.0
"""A worker that lost its Master tries to register every second or so, and may meet a timeout."""


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
        routing = plugins.build("routing", config.routing.name, **config.routing.params)
        if not plugins.is_own("routing", config.routing.name):
            routing = Watched(routing)
        self._core = Master(
            term,
            routing,
            max_queue_requests=config.max_queue_requests,
            max_queue_tokens=config.max_queue_tokens,
            ttft_limit_s=config.max_ttft_s,
            grace_s=WORKERS_RETURN_S,
            limits=config.limits,
            tenants=Tenants(
                {name: tenant.terms() for name, tenant in config.tenants.items()},
                config.default_tenant.terms(),
                capacity=MOST_TENANTS,
            ),
        )
        self._api = Api(
            config,
            secret,
            metrics=self.metrics,
            to_master=self._to_master,
            on_note=self._on_note,
        )
        self.loop = MasterLoop(
            self._core, secret=secret, term=term, on_card=self._api.offer, on_note=self._on_note
        )
        self.frontend = self._api.loop
        self._requests = self._api.requests
        desk_id = FrontendId(f"schedule-{secrets.token_hex(4)}")
        self.desk = Desk(desk_id, lambda message: self.loop.from_frontend(desk_id, message))
        outside = self._api.outside(
            tell=lambda worker_id, message: self.loop.driver.tell(From(worker_id, message)),
            leave=lambda worker_id, epoch: self.loop.driver.tell(LinkDown(worker_id, epoch)),
            refusal=self._core.refusal,
            member=self._core.fleet.members.get,
        )
        schedule = self._api.schedule(
            self.desk,
            pools=lambda: self._core.fleet.pools,
            booked=self._core.booked,
            outside=outside,
            lease_s=config.schedule_lease_s,
        )
        self._listener = listen(config.host, config.port)
        app = self._api.app(
            overview=self.overview,
            placement=lambda request_id: self._core.placement(RequestId(request_id)),
            clients=config.frontend,
        )
        app.add_routes([*self.loop.routes(), *schedule.routes(), *outside.routes()])
        self._runner = make_runner(app, HotRoutes(schedule.find, STEMS))
        self._watch = LoopWatch(self.loop.driver.times, self.loop.busy)
        self.metrics.watch(loop=self.loop.driver.times)

    async def start(self) -> None:
        """Serves; workers may come from now on."""
        if self._config.frontend:
            self.loop.join(self.frontend)
        self.loop.join(self.desk)
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
        self.desk.close()
        self.loop.hang_up_frontends()
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
        facts["frontend"] = dataclasses.asdict(self._api.counters)
        facts["loop"] = self.loop.driver.times.as_dict()
        return facts

    def _to_master(self, message: Ask | Cancel) -> None:
        self.loop.from_frontend(self.frontend.frontend_id, message)

    def _on_note(self, note: Note) -> None:
        self._log(note)
        self.metrics.note(note.event, note.fields)


def main() -> None:
    run("rtp.master", from_command_line(MasterConfig), MasterServer)


if __name__ == "__main__":
    main()

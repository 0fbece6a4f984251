"""The asyncio driver of core.master: registrations and frontends in, links out, a frontend in the
same process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from rtp.core.card import ModelCard
from rtp.core.commands import Command, Dial, HangUp, Note, Send
from rtp.core.errors import ProtocolError
from rtp.core.events import Event, From, FrontendUp, LinkDown, LinkUp, LoopBusy
from rtp.core.messages import (
    STATUS_COLUMNS,
    Ask,
    AskMessage,
    Cancel,
    Delta,
    Done,
    Message,
    Register,
    Renew,
    Snapshot,
    Status,
)
from rtp.core.types import FrontendId, Tier, WorkerId
from rtp.io.ask_link import AskLinks
from rtp.io.driver import Core, Driver, fault_note
from rtp.io.handshake import new_nonce
from rtp.io.model_offers import Shelf, fetch_card
from rtp.io.name_service import StaticNames
from rtp.io.registration import CHALLENGE, REGISTER_PATH, ask_headers, receive
from rtp.io.reminder import Reminder
from rtp.io.worker_link import Links

CARD_RETRY_S = 1.0
MAX_REGISTERS = 4096
STATUS_ROW_BYTES = 8 * len(STATUS_COLUMNS)
NUM_TIERS = len(Tier)


class MasterCore(Core, Protocol):
    def refusal(self, worker_id: WorkerId, epoch: int) -> str: ...

    def models(self) -> dict[str, bool]: ...


class LocalFrontend(Protocol):
    """A frontend in this process."""

    frontend_id: FrontendId

    def master_up(self, term: int) -> None: ...

    def from_master(self, message: AskMessage) -> None: ...


class MasterLoop:
    """Drives one Master. Build inside the running loop, then join() a frontend, if one lives in
    this process, and start(). Others dial.

    on_card(card): the model of a worker, once per new card.  on_note: gets every Note.
    """

    def __init__(
        self,
        core: MasterCore,
        *,
        secret: bytes,
        term: int,
        on_card: Callable[[ModelCard], None],
        on_note: Callable[[Note], None],
    ) -> None:
        self.term = term
        self.driver = Driver(core, self._perform, self._fault)
        self._core = core
        self._reminder = Reminder()
        self._secret = secret
        self._challenge = new_nonce()
        self._on_card = on_card
        self._on_note = on_note
        self._links = Links(
            secret=secret, term=term, on_event=self._from_links, on_closed=self._link_closed
        )
        self._frontends: dict[str, LocalFrontend] = {}
        self._asks = AskLinks(secret=secret, term=term, on_event=self.driver.tell, on_note=on_note)
        self._shelf = Shelf(secret, core.models)
        self._registers: dict[WorkerId, Register] = {}
        self._linked: dict[WorkerId, str] = {}
        self._cards: dict[str, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._names: StaticNames | None = None

    def busy(self, share: float) -> None:
        """How much of a core this loop has used lately."""
        self.driver.tell(LoopBusy(share))

    def routes(self) -> list[web.RouteDef]:
        """Where workers register and frontends dial; to be added to the process's HTTP server."""
        register = web.post(REGISTER_PATH, self._register_route)
        return [register, self._asks.route(), *self._shelf.routes()]

    def join(self, frontend: LocalFrontend) -> None:
        """A frontend in this process: what it and the Master tell each other are function calls."""
        self._frontends[frontend.frontend_id] = frontend
        self.driver.tell(FrontendUp(frontend.frontend_id))
        frontend.master_up(self.term)

    async def start(self, workers: Sequence[str] = ()) -> None:
        """workers: addresses to ask, beside those who register by themselves."""
        self._session = aiohttp.ClientSession()
        if workers:
            self._names = StaticNames(
                workers,
                session=self._session,
                secret=self._secret,
                challenge=self._challenge,
                known=lambda address: address in self._linked.values(),
                on_register=self.register,
            )

    def hang_up_frontends(self) -> None:
        """Ends their connections before the HTTP server that carries them ends; no more come."""
        self._asks.close()

    async def close(self) -> None:
        self._asks.close()
        self.driver.close()
        self._links.close()
        if self._names is not None:
            self._names.close()
        for task in self._cards.values():
            task.cancel()
        await asyncio.gather(*self._cards.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def from_frontend(self, frontend_id: FrontendId, message: Ask | Cancel | Done | Renew) -> None:
        self.driver.tell(From(frontend_id, message))

    def register(self, register: Register) -> str:
        """A proved, well-formed registration. Returns why it is not taken, "" where it is. Of one
        that is not, the card counts for nothing: it must not replace the one that is served."""
        self.driver.tell(From(register.worker_id, register))
        refusal = self._core.refusal(register.worker_id, register.epoch)
        if refusal:
            return refusal
        self._registers[register.worker_id] = register
        if len(self._registers) > MAX_REGISTERS:
            self._forget_one()
        if register.card not in self._cards:
            self._cards[register.card] = asyncio.create_task(self._fetch_card(register))
        return ""

    def _forget_one(self) -> None:
        """The longest known worker without a link; its card goes with the last that offers it."""
        for worker_id in self._registers:
            if worker_id not in self._linked:
                card = self._registers.pop(worker_id).card
                if all(other.card != card for other in self._registers.values()):
                    self._cards.pop(card).cancel()
                return

    # ------------------------------------------------------------ in

    async def _register_route(self, request: web.Request) -> web.Response:
        found = await receive(request, self._secret, self._challenge)
        if isinstance(found, web.Response):
            met = request.headers.get(CHALLENGE) == self._challenge  # else it is new here
            if met and self._reminder.due(f"{request.remote} {found.text}"):
                facts = {"status": found.status, "reason": found.text}
                self._note("registration.refused", source=request.remote, **facts)
            return found
        refusal = self.register(found)
        if refusal:
            return web.Response(status=409, text=refusal)
        return web.json_response({"term": self.term})

    def _from_links(self, event: Event) -> None:
        match event:
            case From(peer=peer, message=message):
                fits = _FITS.get(type(message))
                if fits is not None:
                    fits(message, self._registers[WorkerId(peer)].ranks)
            case LinkUp(worker_id=worker_id):
                self._linked[worker_id] = self._registers[worker_id].address
            case LinkDown(worker_id=worker_id):
                self._linked.pop(worker_id, None)
        self.driver.tell(event)

    async def _fetch_card(self, register: Register) -> None:
        """GET /card from a worker until its digest is the registered one or the worker is
        another."""
        assert self._session is not None
        last = ""
        while True:
            try:
                url = f"http://{register.address}/card"
                headers = ask_headers(self._secret, self._challenge, "/card")
                card = await fetch_card(self._session, url, register.card, headers)
            except (aiohttp.ClientError, OSError, TimeoutError, ProtocolError) as error:
                if str(error) != last:
                    last = str(error)
                    self._note("card.failed", worker_id=register.worker_id, reason=last)
            else:
                self._shelf.put(card)
                self._on_card(card)
                return
            await asyncio.sleep(CARD_RETRY_S)
            # Whoever else offers this card is as good a source, and the latest the likeliest alive.
            offers = [r for r in self._registers.values() if r.card == register.card]
            if not offers:
                del self._cards[register.card]
                return
            register = offers[-1]

    # ------------------------------------------------------------ out

    def _perform(self, command: Command) -> None:
        match command:
            case Send(peer=peer, message=message):
                frontend = self._frontends.get(peer)
                # The core answers frontends with answers and tells workers what is for workers.
                if frontend is not None:
                    frontend.from_master(message)  # type: ignore[arg-type]
                elif not self._asks.send(peer, message):  # type: ignore[arg-type]
                    self._links.send(WorkerId(peer), message)  # type: ignore[arg-type]
            case Dial(worker_id=worker_id, epoch=epoch, address=address):
                self._linked.pop(worker_id, None)
                self._links.dial(worker_id, epoch, address)
            case HangUp(worker_id=worker_id, epoch=epoch):
                if self._links.hang_up(worker_id, epoch):
                    self._linked.pop(worker_id, None)
            case Note():
                self._on_note(command)
            case _:
                raise TypeError(f"not a command of a Master: {type(command).__name__}")

    def _fault(self, error: Exception) -> None:
        self._on_note(fault_note("master", error))

    def _link_closed(self, worker_id: str, reason: str) -> None:
        self._note("link.closed", worker_id=worker_id, reason=reason)

    def _note(self, event: str, **fields: object) -> None:
        self._on_note(Note(event, fields))


def _status_fits(status: Status, ranks: int) -> None:
    if len(status.table) != ranks * STATUS_ROW_BYTES:
        raise ProtocolError("a Status has one row per rank")


def _changes_fit(message: Delta | Snapshot, ranks: int) -> None:
    for change in message.changes:
        if not (0 <= change.rank < ranks and 0 <= change.tier < NUM_TIERS):
            raise ProtocolError("a change of no rank or tier here")


_FITS: dict[type[Message], Callable[[Any, int], None]] = {  # Any: each takes its own type
    Status: _status_fits,
    Delta: _changes_fit,
    Snapshot: _changes_fit,
}
"""What a worker says must fit what it registered. Each raises ProtocolError, which costs the
link."""

"""Which models there are, told by the Master to frontends in other processes, with their cards.

Who asks proves the cluster secret (io/registration); so does the list of models, and a card is the
one whose digest the list names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import aiohttp
import msgspec
from aiohttp import web

from rtp.core.card import ModelCard
from rtp.core.errors import ProtocolError
from rtp.io.handshake import body_proof, new_nonce, same
from rtp.io.registration import CHALLENGE, PROOF, TIMEOUT, ask_headers, asked_by_one_of_us

MODELS_PATH = "/internal/models"
CARDS_PATH = "/internal/cards"
MAX_CARD_BYTES = 64 << 20
LOOK_AGAIN_S = 1.0
LOOK_SOON_S = 0.2
PURPOSE = "models"


class Offer(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One model, as the Master offers it."""

    model: str
    card: str
    """Digest of its card."""
    ready: bool
    """Some worker may serve it now."""


def read_card(body: bytes, digest: str) -> ModelCard:
    """A card that came as bytes. Raises ProtocolError unless its digest is this one, which was
    proved; so the card needs no proof of its own."""
    try:
        card = msgspec.msgpack.decode(body, type=ModelCard)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a model card: {error}") from None
    if card.digest() != digest:
        raise ProtocolError("the card is not the registered one")
    return card


async def fetch_card(
    session: aiohttp.ClientSession, url: str, digest: str, headers: dict[str, str]
) -> ModelCard:
    """GETs a card. Raises ProtocolError, OSError, TimeoutError or aiohttp.ClientError."""
    async with session.get(url, headers=headers, timeout=TIMEOUT) as answer:
        body = await answer.content.read(MAX_CARD_BYTES)
        while len(body) < MAX_CARD_BYTES and (more := await answer.content.read(MAX_CARD_BYTES)):
            body += more
    return read_card(body, digest)


# ---------------------------------------------------------------- the Master's side


class Shelf:
    """The cards of all models; the first of a name is the one that counts.

    ready(): the models there are, and whether each can be served now.
    """

    def __init__(self, secret: bytes, ready: Callable[[], Mapping[str, bool]]) -> None:
        self._secret = secret
        self._ready = ready
        self._cards: dict[str, tuple[str, bytes]] = {}

    def put(self, card: ModelCard) -> None:
        self._cards.setdefault(card.model, (card.digest(), msgspec.msgpack.encode(card)))

    def routes(self) -> list[web.RouteDef]:
        return [web.get(MODELS_PATH, self._list), web.get(f"{CARDS_PATH}/{{digest}}", self._card)]

    async def _list(self, request: web.Request) -> web.Response:
        if not asked_by_one_of_us(request, self._secret):
            return web.Response(status=401, text="not proved")
        ready = self._ready()
        offers = [Offer(m, digest, ready.get(m, False)) for m, (digest, _) in self._cards.items()]
        body = msgspec.msgpack.encode(offers)
        proof = body_proof(self._secret, PURPOSE, request.headers[CHALLENGE], body)
        return web.Response(body=body, content_type="application/msgpack", headers={PROOF: proof})

    async def _card(self, request: web.Request) -> web.Response:
        if not asked_by_one_of_us(request, self._secret):
            return web.Response(status=401, text="not proved")
        wanted = request.match_info["digest"]
        for digest, packed in self._cards.values():
            if digest == wanted:
                return web.Response(body=packed, content_type="application/msgpack")
        return web.Response(status=404, text="no such card")


# ---------------------------------------------------------------- the frontend's side


class ModelWatch:
    """Asks the Master for its models, once a second, more often while none is ready, and on wake();
    until closed.

    on_card(card): a card that is new, or another than before of its model; called before the model
    is ready.  on_trouble(reason): why the last try failed.
    """

    def __init__(
        self,
        master: str,
        *,
        secret: bytes,
        on_card: Callable[[ModelCard], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        """master: host:port."""
        self.ready: frozenset[str] = frozenset()
        """Models that can be served, when last heard of."""
        self._base = f"http://{master}"
        self._secret = secret
        self._challenge = new_nonce()
        self._on_card = on_card
        self._on_trouble = on_trouble
        self._known: dict[str, str] = {}
        self._news = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def wake(self) -> None:
        """Something has changed: asks now."""
        self._news.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                self._news.clear()
                try:
                    await self._look(session)
                except (aiohttp.ClientError, OSError, TimeoutError, ProtocolError) as error:
                    self.ready = frozenset()
                    self._on_trouble(str(error) or type(error).__name__)
                try:
                    async with asyncio.timeout(LOOK_AGAIN_S if self.ready else LOOK_SOON_S):
                        await self._news.wait()
                except TimeoutError:
                    pass

    async def _look(self, session: aiohttp.ClientSession) -> None:
        offers = await self._offers(session)
        for offer in offers:
            if self._known.get(offer.model) != offer.card:
                path = f"{CARDS_PATH}/{offer.card}"
                headers = ask_headers(self._secret, self._challenge, path)
                self._on_card(await fetch_card(session, self._base + path, offer.card, headers))
                self._known[offer.model] = offer.card
        self.ready = frozenset(offer.model for offer in offers if offer.ready)

    async def _offers(self, session: aiohttp.ClientSession) -> list[Offer]:
        headers = ask_headers(self._secret, self._challenge, MODELS_PATH)
        async with session.get(
            self._base + MODELS_PATH, headers=headers, timeout=TIMEOUT
        ) as answer:
            body = await answer.read()
            if answer.status != 200:
                raise ProtocolError(f"the Master answered {answer.status}")
            expected = body_proof(self._secret, PURPOSE, self._challenge, body)
            if not same(answer.headers.get(PROOF, ""), expected):
                raise ProtocolError("the Master does not hold this cluster's secret")
        try:
            return msgspec.msgpack.decode(body, type=list[Offer])
        except msgspec.DecodeError as error:
            raise ProtocolError(f"not a list of models: {error}") from None

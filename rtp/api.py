"""The HTTP API for clients and the frontend behind it, as the Master's process and rtp.frontend
share it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rtp.config import Public
from rtp.core.card import ModelCard
from rtp.core.commands import Note
from rtp.core.errors import ConfigError
from rtp.core.frontend.frontend import Frontend
from rtp.core.frontend.lives import Counters
from rtp.core.messages import Ask, Cancel
from rtp.core.ports import Detokenizer
from rtp.core.types import FrontendId, RequestId, WorkerId
from rtp.io.frontend_loop import FrontendLoop
from rtp.io.handshake import key_id
from rtp.io.http_auth import Keys
from rtp.io.http_frontend import make_app
from rtp.io.metrics import Metrics
from rtp.io.openai_request import Limits, hash_algorithm
from rtp.io.tokenizer import Tokenizer

if TYPE_CHECKING:  # a frontend apart takes none of the Master's code into its memory
    from rtp.core.master.booking import Booking
    from rtp.core.master.members import Member
    from rtp.core.master.pool import Pool
    from rtp.io.http_outside import OutsideWorkers, Told
    from rtp.io.http_schedule import Schedule
    from rtp.io.schedule_desk import Desk


class Api:
    """A frontend of this process's life, with the tokenizers of the models it has been offered.

    to_master: carries an Ask or Cancel.  on_note: gets every Note.
    """

    def __init__(
        self,
        config: Public,
        secret: bytes,
        *,
        metrics: Metrics,
        to_master: Callable[[Ask | Cancel], None],
        on_note: Callable[[Note], None],
    ) -> None:
        self._config = config
        self._secret = secret
        self._metrics = metrics
        self._on_note = on_note
        self._api_key = os.environ.get("RTP_API_KEY")
        self._admin_key = os.environ.get("RTP_ADMIN_KEY")
        self._tenants = read_keys(config.api_key_file) if config.api_key_file else None
        self._keys = Keys(self._api_key, self._admin_key, self._tenants or {})
        self._tokenizers: dict[str, Tokenizer] = {}
        frontend_id = FrontendId(f"frontend-{secrets.token_hex(4)}")
        self.requests = Frontend(frontend_id, self._detokenizer)
        self.loop = FrontendLoop(
            self.requests,
            frontend_id=frontend_id,
            secret=secret,
            to_master=to_master,
            on_note=on_note,
        )

    @property
    def counters(self) -> Counters:
        return self.requests.counters

    def app(
        self,
        *,
        overview: Callable[[], dict[str, Any]] | None = None,  # Any: JSON
        placement: Callable[[str], dict[str, Any] | None] | None = None,
        ready: Callable[[], bool] | None = None,
        clients: bool = True,
    ) -> web.Application:
        """Its routes; the arguments are those of io/http_frontend."""
        config = self._config
        return make_app(
            self.loop,
            codec_of=lambda card: self._tokenizers[card.model],
            overview=overview,
            placement=placement,
            ready=ready,
            clients=clients,
            metrics=self._metrics,
            secret=self._secret,
            api_key=self._api_key,
            admin_key=self._admin_key,
            tenants=self._tenants,
            max_body_bytes=config.max_body_bytes,
        )

    def schedule(
        self,
        desk: Desk,
        *,
        pools: Callable[[], Mapping[str, Pool]],
        booked: Callable[[RequestId], Booking | None],
        outside: OutsideWorkers,
        lease_s: float,
    ) -> Schedule:
        """The routes of router-only mode, under the same keys; io/http_schedule has the rest."""
        from rtp.io.http_schedule import Schedule

        return Schedule(
            desk,
            pools=pools,
            booked=booked,
            cards=self.loop.models,
            outside=outside,
            keys=self._keys,
            limits=Limits(self._secret, algorithm=hash_algorithm(self._tenants)),
            metrics=self._metrics,
            lease_s=lease_s,
        )

    def outside(
        self,
        *,
        tell: Callable[[WorkerId, Told], None],
        leave: Callable[[WorkerId, int], None],
        refusal: Callable[[WorkerId, int], str],
        member: Callable[[WorkerId], Member | None],
    ) -> OutsideWorkers:
        """The routes by which engines of others are told of (io/http_outside)."""
        from rtp.io.http_outside import OutsideWorkers

        return OutsideWorkers(
            self._keys,
            key_id=key_id(self._secret),
            tell=tell,
            leave=leave,
            refusal=refusal,
            member=member,
        )

    def offer(self, card: ModelCard, *, replace: bool = False) -> None:
        """A model can be asked for. Its tokenizer is built before: a first request must not wait
        for it. replace: this card counts, even where another of the name is known."""
        if card.model not in self._tokenizers or replace:
            try:
                self._tokenizers[card.model] = Tokenizer(card)
            except ConfigError as error:
                self._on_note(Note("card.failed", {"model": card.model, "reason": str(error)}))
                return
        self.loop.add_model(card, replace=replace)

    def _detokenizer(self, model: str, skip_special_tokens: bool) -> Detokenizer:
        return self._tokenizers[model].detokenizer(skip_special_tokens)


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

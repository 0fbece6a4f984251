"""Router-only mode over HTTP: where a request should run, told to callers with own engines.

    POST   /v1/schedule              -> a place; charged until the caller is done or its lease ends
    POST   /v1/schedule/{id}/done    what the engine really computed
    POST   /v1/schedule/{id}/renew   still at it
    DELETE /v1/schedule/{id}         called off

Each route exists twice with one meaning: as a hot route of io/fast_http and for aiohttp, which gets
whatever is not plain.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping

import msgspec
import structlog
from aiohttp import web

from rtp.core.card import ModelCard
from rtp.core.hashing import block_hashes, namespace
from rtp.core.master.booking import Booking
from rtp.core.master.pool import Pool
from rtp.core.messages import Ask, Done, Grant, Refuse, Renew
from rtp.core.types import Hashes, Ids, RequestId, WorkerId, num_hashes
from rtp.io.errors_http import ApiError, context_exceeded, invalid, model_not_found, no_worker
from rtp.io.fast_http import Call, Handler
from rtp.io.hash_lists import is_null, packed
from rtp.io.http_account import REQUEST_ID, usable_id
from rtp.io.http_auth import Keys
from rtp.io.http_body import header_seconds, header_text, read_json, seconds
from rtp.io.http_outside import OutsideWorkers
from rtp.io.metrics import Metrics
from rtp.io.openai_prompts import pack_checked
from rtp.io.openai_request import HASH_INLINE_BYTES, Caller, Limits, bounded_chat_id, tenant_salt
from rtp.io.schedule_desk import Desk
from rtp.io.schedule_schema import DoneBody, RenewBody, ScheduleBody, parse

PATH = "/v1/schedule"
ONE = PATH + "/{id}"
DONE, RENEW = ONE + "/done", ONE + "/renew"
TARGET = PATH.encode()
BELOW = TARGET + b"/"
STEMS = (b"POST " + TARGET, b"DELETE " + BELOW)
OUTCOMES = frozenset({"done", "failed", "cancelled"})

log = structlog.get_logger(__name__)


class DecodeRank(msgspec.Struct, frozen=True, gc=False):
    """Of a request that the Master splits."""

    worker_id: str
    address: str
    rank: int


class Placed(msgspec.Struct, frozen=True, gc=False):
    """The answer to POST /v1/schedule."""

    request_id: str
    attempt: int
    worker_id: str
    address: str
    rank: int
    decode_rank: DecodeRank | None
    """Where the caller should go on after the first token; reserved as well."""
    matched_tokens: int
    lease_s: float
    reasons: str
    """Where the candidates' numbers are, for as long as they are remembered."""


class Schedule:
    """pools: of the Master, by model.  booked: an open grant.  cards: of models whose workers
    offered one; prompts of others are hashed under the model's name."""

    def __init__(
        self,
        desk: Desk,
        *,
        pools: Callable[[], Mapping[str, Pool]],
        booked: Callable[[RequestId], Booking | None],
        cards: Mapping[str, ModelCard],
        outside: OutsideWorkers,
        keys: Keys,
        limits: Limits,
        metrics: Metrics,
        lease_s: float,
    ) -> None:
        self._desk = desk
        self._pools = pools
        self._booked = booked
        self._cards = cards
        self._outside = outside
        self._keys = keys
        self._limits = limits
        self._metrics = metrics
        self._lease_s = lease_s
        self._prefix = f"{desk.frontend_id}-"
        self._numbers = itertools.count(1)
        self._hot = {b"done": self._hot_done, b"renew": self._hot_renew}
        self._schedule = msgspec.json.Decoder(ScheduleBody)
        self._done = msgspec.json.Decoder(DoneBody)
        self._renew = msgspec.json.Decoder(RenewBody)
        self._encode = msgspec.json.Encoder().encode

    # ------------------------------------------------------------ aiohttp's side

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(PATH, self._schedule_route),
            web.post(DONE, self._done_route),
            web.post(RENEW, self._renew_route),
            web.delete(ONE, self._cancel_route),
        ]

    async def _schedule_route(self, request: web.Request) -> web.Response:
        caller = Caller(
            tenant=self._keys.tenant(request),
            chat_id=header_text(request, "X-Session-Id"),
            timeout_s=header_seconds(request, "X-Request-Timeout"),
        )
        body = parse(self._schedule, await read_json(request))
        wanted = self._wanted(body, caller)
        hashes = (
            await asyncio.to_thread(self._hashes, wanted)
            if len(wanted.ids) > HASH_INLINE_BYTES
            else self._hashes(wanted)
        )
        answer: asyncio.Future[Grant | Refuse] = asyncio.get_running_loop().create_future()
        ask = self._ask(wanted, hashes)
        self._desk.ask(ask, answer.set_result)
        try:
            message = await answer
        except asyncio.CancelledError:
            self._desk.call_off(ask.request_id, ask.attempt, "client gone")
            raise
        if isinstance(message, Refuse):
            raise _refusal(message)
        return _json(self._placed(message, hashes))

    async def _done_route(self, request: web.Request) -> web.Response:
        tenant = self._keys.tenant(request)
        return _json(self.done(request.match_info["id"], await read_json(request), tenant))

    async def _renew_route(self, request: web.Request) -> web.Response:
        tenant = self._keys.tenant(request)
        return _json(self.renew(request.match_info["id"], await read_json(request), tenant))

    async def _cancel_route(self, request: web.Request) -> web.Response:
        tenant = self._keys.tenant(request)
        return _json(self.cancel(request.match_info["id"], b"", tenant))

    # ------------------------------------------------------------ the hot side

    def find(self, method: bytes, target: bytes) -> Handler | None:
        """For io/fast_http."""
        if method == b"POST":
            if target == TARGET:
                return self._hot_schedule
            return self._hot.get(_parts(target)[2])
        one, slash, _ = _parts(target)
        return self._hot_cancel if method == b"DELETE" and one and not slash else None

    def _hot_schedule(self, call: Call) -> None:
        try:
            body = parse(self._schedule, call.body)
            wanted = self._wanted(body, self._caller(call))
            ask = self._ask(wanted, self._hashes(wanted))
        except Exception as error:
            self._fail(call, PATH, error)
            return

        def answer(message: Grant | Refuse) -> None:
            if isinstance(message, Refuse):
                self._fail(call, PATH, _refusal(message))
            else:
                self._answer(call, PATH, self._placed(message, ask.hashes), message.request_id)

        def gone() -> None:
            self._desk.call_off(ask.request_id, ask.attempt, "client gone")
            self._metrics.request(PATH, "disconnected", 499, generates=False)

        call.on_gone = gone
        self._desk.ask(ask, answer)

    def _hot_done(self, call: Call) -> None:
        self._at_once(call, DONE, self.done)

    def _hot_renew(self, call: Call) -> None:
        self._at_once(call, RENEW, self.renew)

    def _hot_cancel(self, call: Call) -> None:
        self._at_once(call, ONE, self.cancel)

    def _at_once(self, call: Call, route: str, act: Callable[[str, bytes, str], bytes]) -> None:
        request_id = call.target[len(BELOW) :].partition(b"/")[0].decode()
        try:
            tenant = self._keys.tenant_of(call.headers.get("authorization", ""))
            body = act(request_id, call.body, tenant)
        except Exception as error:
            self._fail(call, route, error)
        else:
            self._answer(call, route, body, request_id)

    def _caller(self, call: Call) -> Caller:
        header = call.headers.get
        timeout = header("x-request-timeout")
        return Caller(
            self._keys.tenant_of(header("authorization", "")),
            header("x-session-id", ""),
            None if timeout is None else seconds("X-Request-Timeout", timeout),
        )

    def _answer(self, call: Call, route: str, body: bytes, request_id: str) -> None:
        self._metrics.request(route, "ok", 200, generates=False)
        call.answer(200, body, f"{REQUEST_ID}: {_echo(call, request_id)}\r\n")

    def _fail(self, call: Call, route: str, error: Exception) -> None:
        if not isinstance(error, ApiError):
            log.error("schedule.failed", exc_info=error)
            error = ApiError(500, "The server had an error", code="internal_error")
        self._metrics.request(route, error.outcome, error.status, generates=False)
        self._metrics.refused(error.code)
        lines = "".join(f"{name}: {value}\r\n" for name, value in error.headers().items())
        call.answer(error.status, error.body(), f"{lines}{REQUEST_ID}: {_echo(call, '-')}\r\n")

    # ------------------------------------------------------------ what both sides do

    def done(self, request_id: str, body: bytes, tenant: str) -> bytes:
        """Settles a grant. Raises ApiError."""
        told = parse(self._done, body)
        outcome = told.outcome or "done"
        if outcome not in OUTCOMES:
            raise invalid("outcome", f"outcome must be one of {', '.join(sorted(OUTCOMES))}")
        booking = self._open(request_id, told.attempt, tenant)
        grant = booking.grant
        self._check_told(told, booking)
        if outcome == "cancelled":
            self._desk.call_off(grant.request_id, grant.attempt, "cancelled")
        else:
            if outcome == "done":
                self._outside.ran(grant)
            self._desk.tell(
                Done(
                    grant.request_id,
                    grant.attempt,
                    outcome,
                    _or(told.prompt_tokens, 0),
                    _or(told.cached_tokens, -1),
                    _or(told.generated_tokens, -1),
                    told.prefill_s or 0.0,
                )
            )
        return b'{"status":"settled"}'

    def renew(self, request_id: str, body: bytes, tenant: str) -> bytes:
        """Lets the lease start anew. Raises ApiError."""
        told = parse(self._renew, body)
        grant = self._open(request_id, told.attempt, tenant).grant
        lease_s = told.lease_s or grant.lease_s
        self._desk.tell(Renew(grant.request_id, grant.attempt, lease_s, bool(told.prefilled)))
        return self._encode({"status": "renewed", "lease_s": lease_s})

    def cancel(self, request_id: str, body: bytes, tenant: str) -> bytes:
        """Takes a grant back, whatever the body. Raises ApiError."""
        grant = self._open(request_id, None, tenant).grant
        self._desk.call_off(grant.request_id, grant.attempt, "cancelled")
        return b'{"status":"cancelled"}'

    def _open(self, request_id: str, attempt: int | None, tenant: str) -> Booking:
        """Another tenant's grants are nobody's business."""
        booking = self._booked(RequestId(request_id))
        found = booking is not None and booking.external and booking.tenant == tenant
        if booking is None or not found or attempt not in (None, booking.grant.attempt):
            raise ApiError(
                404,
                "No such grant is open: it was settled, its lease ended, or its worker was lost",
                param="id",
                code="grant_not_found",
            )
        return booking

    def _check_told(self, told: DoneBody, booking: Booking) -> None:
        """What cannot have happened would teach the Master lengths and rates that harm others.
        Raises ApiError."""
        prompt, cached = told.prompt_tokens or 0, told.cached_tokens or 0
        if not (prompt or cached or told.generated_tokens):
            return
        most = self._pools()[booking.model].max_model_len
        if prompt > most:
            raise invalid("prompt_tokens", f"prompt_tokens is over the model's context of {most}")
        if cached > prompt:
            raise invalid("cached_tokens", "cached_tokens is more than prompt_tokens")
        if (told.generated_tokens or 0) > most * booking.choices:
            text = f"generated_tokens is over the context of {most} for each choice"
            raise invalid("generated_tokens", text)

    def _wanted(self, body: ScheduleBody, caller: Caller) -> Wanted:
        """Checks what needs no hashing. Raises ApiError."""
        pool = self._pool(body.model)
        ids = b""
        if body.token_ids is not None:
            if not is_null(body.hashes):
                raise _either()
            card = self._cards.get(pool.model)
            ids = pack_checked(body.token_ids, card.vocab_size if card else 2**31, "token_ids")
            if not ids:
                raise invalid("token_ids", "token_ids is empty")
            if body.num_tokens not in (None, len(ids) // 4):
                raise invalid("num_tokens", "num_tokens is not the number of token_ids")
        before = None
        if body.request_id is not None:
            before = self._open(body.request_id, None, caller.tenant)
        return Wanted(body, caller, pool, ids, before)

    def _pool(self, model: str | None) -> Pool:
        pools = self._pools()
        if not pools:
            raise no_worker()
        if model is None:
            served = {name: pool for name, pool in pools.items() if pool.members} or pools
            if len(served) > 1:
                raise invalid("model", f"model is missing; there are {', '.join(sorted(served))}")
            return next(iter(served.values()))
        pool = pools.get(model)
        if pool is None:
            raise model_not_found(model)
        return pool

    def _hashes(self, wanted: Wanted) -> Hashes:
        """As the caller gave them, or of its token ids as a frontend makes them."""
        if wanted.body.token_ids is None:
            hashes = packed(wanted.body.hashes)
            if not hashes and is_null(wanted.body.hashes):
                raise _either()
            return hashes
        card = self._cards.get(wanted.pool.model)
        seed = namespace(
            secret=self._limits.secret,
            revision=card.revision if card else wanted.pool.model,
            salt=tenant_salt(wanted.caller.tenant, wanted.body.cache_salt or ""),
            algorithm=self._limits.algorithm,
        )
        return block_hashes(wanted.ids, wanted.pool.block_size, seed)

    def _ask(self, wanted: Wanted, hashes: Hashes) -> Ask:
        """Raises ApiError for lengths that do not fit each other or the model."""
        body, caller, pool, before = wanted.body, wanted.caller, wanted.pool, wanted.before
        num_blocks = num_hashes(hashes)
        num_tokens = body.num_tokens or len(wanted.ids) // 4 or num_blocks * pool.block_size
        if not num_tokens:
            raise invalid("num_tokens", "num_tokens is missing, and there are no hashes")
        if num_blocks * pool.block_size > num_tokens:
            text = f"{num_blocks} blocks of {pool.block_size} are more than {num_tokens} tokens"
            raise invalid("num_tokens", text)
        room = pool.max_model_len - num_tokens
        if room < 0:
            raise context_exceeded("num_tokens", pool.max_model_len, f"you told of {num_tokens}")
        timeout_s = body.timeout_s or caller.timeout_s or self._limits.default_timeout_s
        timeout_s = min(timeout_s, self._limits.max_timeout_s)
        at_once = body.wait is not None and not body.wait
        if body.wait and body.wait is not True:
            timeout_s = min(timeout_s, body.wait)
        exclude = body.exclude or ()
        if before is not None and body.exclude is None:
            exclude = [before.grant.worker_id]
        return Ask(
            frontend_id=self._desk.frontend_id,
            request_id=before.grant.request_id if before else self._new_id(),
            attempt=before.grant.attempt + 1 if before else 1,
            model=pool.model,
            tenant=caller.tenant,
            chat_id=bounded_chat_id(caller.chat_id or body.chat_id or ""),
            priority=max(-16, min(16, body.priority or 0)),
            hashes=hashes,
            num_tokens=num_tokens,
            max_tokens=room if body.max_tokens is None else body.max_tokens,
            n=body.n or 1,
            deadline_s=timeout_s,
            exclude=tuple(map(WorkerId, exclude)),
            failed=before is not None,
            lease_s=body.lease_s or self._lease_s,
            at_once=at_once,
        )

    def _new_id(self) -> RequestId:
        return RequestId(f"{self._prefix}{next(self._numbers)}")

    def _placed(self, grant: Grant, hashes: Hashes) -> bytes:
        self._outside.placed(grant, hashes)
        to, request_id = grant.decode, grant.request_id
        return self._encode(
            Placed(
                request_id,
                grant.attempt,
                grant.worker_id,
                grant.address,
                grant.rank,
                None if to is None else DecodeRank(to.worker_id, to.address, to.rank),
                grant.matched_tokens,
                grant.lease_s,
                f"/v1/requests/{request_id}/placement",
            )
        )


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """A checked body, and what it refers to."""

    body: ScheduleBody
    caller: Caller
    pool: Pool
    ids: Ids
    before: Booking | None
    """The grant that is to be placed anew."""


def _either() -> ApiError:
    return invalid("hashes", "Give either hashes or token_ids")


def _refusal(refuse: Refuse) -> ApiError:
    return ApiError(
        refuse.status, refuse.reason, code=refuse.code, retry_after_s=refuse.retry_after_s
    )


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _parts(target: bytes) -> tuple[bytes, bytes, bytes]:
    """(id, a slash or nothing, the rest) of a target below PATH; else nothing of all."""
    if not target.startswith(BELOW):
        return b"", b"", b""
    return target[len(BELOW) :].partition(b"/")


def _echo(call: Call, own: str) -> str:
    given = call.headers.get("x-request-id")
    return given if given and usable_id(given) else own


def _or(value: int | None, default: int) -> int:
    return default if value is None else value

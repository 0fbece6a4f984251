"""Engines of others as workers of router-only mode: told of over HTTP instead of by a link.

    PUT    /v1/schedule/workers/{id}         there, or still there: repeat it within silence_s
    DELETE /v1/schedule/workers/{id}         gone
    POST   /v1/schedule/workers/{id}/cache   what its prefix cache gained and lost

An engine that tells of no cache changes is assumed to keep what ran on it, least recently used
blocks leaving first when its KV is full. All of this steers traffic, so it takes the admin key off
loopback.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from rtp.core.master.members import Member
from rtp.core.messages import Delta, Grant, KeyChange, Register, Snapshot
from rtp.core.types import Hashes, RequestId, Role, Tier, WorkerId, split_hashes
from rtp.io.errors_http import ApiError, invalid
from rtp.io.hash_lists import packed
from rtp.io.http_auth import Keys
from rtp.io.http_body import body_too_large, read_json
from rtp.io.schedule_schema import CacheBody, CacheChange, WorkerBody, parse

ONE = "/v1/schedule/workers/{id}"
MOST_BODY = 1 << 20
"""Of a cache report: 50,000 hashes, decoded in about 2 ms."""
SLICE_BYTES = 2000 * 16
"""Hashes handed to the core between two turns of the loop."""
MOST_ID = 256
MOST_PLACED = 10_000
SILENCE_S = 60.0
BATCH_TOKENS = 8192
TIERS = {"device": Tier.DEVICE, "host": Tier.HOST, "store": Tier.STORE}

Told = Register | Delta | Snapshot


class AssumedCache:
    """The blocks a rank should hold that does not tell: at most `capacity`, oldest use out first,
    tails before heads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def use(self, hashes: Hashes) -> tuple[Hashes, Hashes]:
        """A prompt ran: (hashes gained, hashes lost). O(blocks of the prompt and of what left)."""
        blocks, held = self._blocks, split_hashes(hashes)[: self._capacity]
        gained = [key for key in held if key not in blocks]
        for key in reversed(held):
            blocks[key] = None
            blocks.move_to_end(key)
        lost = [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self._capacity)]
        return b"".join(gained), b"".join(lost)


@dataclass(slots=True)
class _Engine:
    register: Register
    tells: bool
    version: int = 0
    assumed: dict[int, AssumedCache] = field(default_factory=dict)


class OutsideWorkers:
    """tell, leave: carry a worker's message, or its end, to the Master.  member: as the Master
    knows it."""

    def __init__(
        self,
        keys: Keys,
        *,
        key_id: str,
        tell: Callable[[WorkerId, Told], None],
        leave: Callable[[WorkerId, int], None],
        refusal: Callable[[WorkerId, int], str],
        member: Callable[[WorkerId], Member | None],
    ) -> None:
        self._keys = keys
        self._key_id = key_id
        self._tell = tell
        self._leave = leave
        self._refusal = refusal
        self._member = member
        self._engines: dict[WorkerId, _Engine] = {}
        self._placed: OrderedDict[RequestId, Hashes] = OrderedDict()
        self._worker = msgspec.json.Decoder(WorkerBody)
        self._cache = msgspec.json.Decoder(CacheBody)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.put(ONE, self._put),
            web.delete(ONE, self._delete),
            web.post(f"{ONE}/cache", self._changes),
        ]

    def placed(self, grant: Grant, hashes: Hashes) -> None:
        """Keeps what will be in the cache of an engine that does not tell."""
        engine = self._engines.get(grant.worker_id)
        if engine is not None and not engine.tells:
            self._placed[grant.request_id] = hashes
            if len(self._placed) > MOST_PLACED:  # those whose lease ended lie in front
                self._placed.popitem(last=False)

    def ran(self, grant: Grant) -> None:
        """The request of a grant was computed."""
        hashes = self._placed.pop(grant.request_id, None)
        engine = self._engines.get(grant.worker_id)
        if hashes is None or engine is None or engine.register.epoch != grant.epoch:
            return
        register, rank = engine.register, grant.rank
        cache = engine.assumed.get(rank)
        if cache is None:
            capacity = register.kv_total[rank] // register.block_size
            cache = engine.assumed[rank] = AssumedCache(capacity)
        gained, lost = cache.use(hashes)
        if gained or lost:
            self._change(engine, KeyChange(rank, Tier.DEVICE, gained, lost))

    # ------------------------------------------------------------ routes

    async def _put(self, request: web.Request) -> web.Response:
        self._keys.check_admin(request)
        worker_id = WorkerId(request.match_info["id"])
        body = parse(self._worker, await read_json(request))
        if len(worker_id) > MOST_ID:
            raise invalid("id", f"A worker's id may have {MOST_ID} characters")
        known = self._engines.get(worker_id)
        present = self._member(worker_id)
        if present is not None and known is None:
            raise ApiError(409, f"{worker_id[:64]} is a worker of rtp's own", code="worker_exists")
        register = self._register(worker_id, body, known.register.epoch if known else 0)
        tells = bool(body.cache_events)
        anew = (
            present is None or known is None or (known.register, known.tells) != (register, tells)
        )
        if anew:
            register = msgspec.structs.replace(
                register, epoch=max(register.epoch + 1, time.time_ns() // 1000)
            )
        self._tell(worker_id, register)
        refusal = self._refusal(worker_id, register.epoch)
        if refusal:
            raise ApiError(409, f"This worker is not taken: {refusal}", code="worker_refused")
        if anew:
            self._engines = {w: e for w, e in self._engines.items() if self._member(w)}
            self._engines[worker_id] = engine = _Engine(register, tells)
            self._clear(engine)
        return web.json_response({"worker_id": worker_id, "new": anew})

    async def _delete(self, request: web.Request) -> web.Response:
        self._keys.check_admin(request)
        engine = self._engine(request)
        del self._engines[engine.register.worker_id]
        self._leave(engine.register.worker_id, engine.register.epoch)
        return web.json_response({"status": "removed"})

    async def _changes(self, request: web.Request) -> web.Response:
        self._keys.check_admin(request)
        engine = self._engine(request)
        if not engine.tells:
            raise invalid(None, "This worker was registered without cache_events")
        data = await read_json(request)
        if len(data) > MOST_BODY:
            raise body_too_large(MOST_BODY)
        body = parse(self._cache, data)
        changes = [
            change
            for told in body.changes or ()
            for change in _key_changes(told, engine.register.ranks)
        ]
        if body.cleared:
            self._clear(engine)
        for i, change in enumerate(changes):
            if i:
                await asyncio.sleep(0)
                if self._engines.get(engine.register.worker_id) is not engine:
                    raise _gone()
            self._change(engine, change)
        return web.json_response({"version": engine.version})

    # ------------------------------------------------------------ to the core

    def _clear(self, engine: _Engine) -> None:
        """Nothing is held, as far as anybody knows."""
        register = engine.register
        engine.version += 1
        snapshot = Snapshot(register.worker_id, register.epoch, engine.version, 0, 1, ())
        self._tell(register.worker_id, snapshot)

    def _change(self, engine: _Engine, change: KeyChange) -> None:
        register = engine.register
        engine.version += 1
        delta = Delta(
            register.worker_id, register.epoch, engine.version - 1, engine.version, (change,)
        )
        self._tell(register.worker_id, delta)

    def _engine(self, request: web.Request) -> _Engine:
        worker_id = WorkerId(request.match_info["id"])
        engine = self._engines.get(worker_id)
        if engine is None or self._member(worker_id) is None:
            raise _gone()
        return engine

    def _register(self, worker_id: WorkerId, body: WorkerBody, epoch: int) -> Register:
        ranks = body.ranks or 1
        profile = tuple(body.profile or ())
        if any(not 0 <= x < 1e6 for x in profile):
            raise invalid("profile", "profile must hold seconds per unit, not negative")
        return Register(
            worker_id=worker_id,
            epoch=epoch,
            address=body.address,
            role=Role.FUSION,
            ranks=ranks,
            kv_total=(body.kv_tokens,) * ranks,
            block_size=body.block_size,
            model=body.model,
            max_model_len=body.max_model_len,
            card="",
            kv_format="outside",
            key_id=self._key_id,
            max_batch_tokens=body.max_batch_tokens or BATCH_TOKENS,
            profile=profile,
            prefix_closed=bool(body.tails_leave_first) or not body.cache_events,
            max_rows=body.max_requests or 0,
            silence_s=body.silence_s or SILENCE_S,
        )


def _key_changes(told: CacheChange, ranks: int) -> Iterator[KeyChange]:
    """In slices that take the core a few milliseconds at most. Raises ApiError."""
    rank = told.rank or 0
    if rank >= ranks:
        raise invalid("changes", f"rank {rank}: this worker has {ranks}")
    tier = TIERS[told.tier or "device"]
    removed, stored = packed(told.removed), packed(told.stored)
    for i in range(0, len(removed), SLICE_BYTES):
        yield KeyChange(rank, tier, b"", removed[i : i + SLICE_BYTES])
    for i in range(0, len(stored), SLICE_BYTES):
        yield KeyChange(rank, tier, stored[i : i + SLICE_BYTES], b"")


def _gone() -> ApiError:
    text = "No such worker is registered: PUT it first, with all that its cache holds after it"
    return ApiError(404, text, param="id", code="worker_not_found")

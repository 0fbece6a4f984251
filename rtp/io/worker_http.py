"""The worker's HTTP server: link and stream, and the facts for people, probes and other Masters."""

from __future__ import annotations

import msgspec
from aiohttp import web

from rtp.core.card import ModelCard
from rtp.core.errors import ProtocolError
from rtp.io.errors_http import ApiError
from rtp.io.http_auth import Keys
from rtp.io.registration import ASK_PATH, answer_ask, asked_by_one_of_us
from rtp.io.upgrade import accept
from rtp.io.worker_loop import WorkerLoop


def make_worker_app(
    loop: WorkerLoop, card: ModelCard, secret: bytes, admin_key: str | None = None
) -> web.Application:
    """Routes: /link /stream /registration /card for holders of the secret; /live /health for all;
    /status /cache /metrics on loopback, elsewhere with the admin key."""
    keys = Keys(None, admin_key, {})
    packed_card = msgspec.msgpack.encode(card)

    async def link(request: web.Request) -> web.StreamResponse:
        return await accept(request, "link", secret, loop.admit_link, loop.open_link)

    async def stream(request: web.Request) -> web.StreamResponse:
        return await accept(request, "stream", secret, loop.admit_stream, loop.open_stream)

    async def registration(request: web.Request) -> web.Response:
        return answer_ask(request, loop.register, secret)

    async def get_card(request: web.Request) -> web.Response:
        if not asked_by_one_of_us(request, secret):
            return web.Response(status=401, text="not proved")
        return web.Response(body=packed_card, content_type="application/msgpack")

    async def live(request: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def health(request: web.Request) -> web.Response:
        reason = loop.ready()
        status = {"status": "ready"} if not reason else {"status": "not ready", "reason": reason}
        return web.json_response(status, status=503 if reason else 200)

    async def status(request: web.Request) -> web.Response:
        keys.check_admin(request)
        return web.json_response(loop.facts(), dumps=_dumps)

    async def cache(request: web.Request) -> web.Response:
        keys.check_admin(request)
        facts = loop.core.overview()
        blocks = [rank["cached_blocks"] for rank in facts["ranks"]]
        answer = {"version": facts["cache_version"], "cached_blocks": blocks}
        return web.json_response(answer, dumps=_dumps)

    async def metrics(request: web.Request) -> web.Response:
        keys.check_admin(request)
        lines = [f"rtp_worker_{name} {value!r}" for name, value in sorted(numbers(loop.facts()))]
        return web.Response(text="\n".join(lines) + "\n")

    app = web.Application(middlewares=[_errors])
    app.add_routes(
        [
            web.get("/link", link, allow_head=False),
            web.get("/stream", stream, allow_head=False),
            web.get(ASK_PATH, registration),
            web.get("/card", get_card),
            web.get("/live", live),
            web.get("/health", health),
            web.get("/status", status),
            web.get("/cache", cache),
            web.get("/metrics", metrics),
        ]
    )
    return app


def numbers(facts: object, prefix: str = "") -> list[tuple[str, float]]:
    """The numbers in nested facts, under names joined by underscores."""
    if isinstance(facts, bool | int | float):
        return [(prefix, float(facts))]
    items: list[tuple[str, object]] = []
    if isinstance(facts, dict):
        items = [(str(key), value) for key, value in facts.items()]
    elif isinstance(facts, list | tuple):
        items = [(str(i), value) for i, value in enumerate(facts)]
    joined = ((f"{prefix}_{key}" if prefix else key, value) for key, value in items)
    return [pair for name, value in joined for pair in numbers(value, name)]


@web.middleware
async def _errors(
    request: web.Request,
    handler: web.Handler,  # type: ignore[name-defined]  # aiohttp does not export it
) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except ProtocolError as error:
        return web.Response(status=400, text=str(error))
    except ApiError as error:
        return web.Response(status=error.status, text=str(error))
    return response


def _dumps(value: object) -> str:
    return msgspec.json.encode(value).decode()

"""The HTTP side of a frontend: OpenAI-compatible routes, probes, metrics and the dashboard."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from rtp.core.card import ModelCard
from rtp.io.dashboard import Dashboard
from rtp.io.errors_http import ApiError, no_worker, stopping
from rtp.io.http_account import INTERNAL, account, echo_request_id
from rtp.io.http_auth import Keys
from rtp.io.http_body import Served
from rtp.io.http_generate import Frontend, Generate
from rtp.io.http_models import Models
from rtp.io.metrics import Metrics
from rtp.io.metrics_master import Overview
from rtp.io.openai_prompts import TextCodec
from rtp.io.openai_request import Limits, hash_algorithm
from rtp.io.sse import SseTimes

Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    frontend: Frontend,
    *,
    codec_of: Callable[[ModelCard], TextCodec],
    overview: Callable[[], Overview] | None = None,
    placement: Callable[[str], dict[str, Any] | None] | None = None,
    ready: Callable[[], bool] | None = None,
    clients: bool = True,
    metrics: Metrics,
    secret: bytes,
    api_key: str | None = None,
    admin_key: str | None = None,
    tenants: Mapping[str, str] | None = None,
    max_body_bytes: int = 32 << 20,
    default_timeout_s: float = 600.0,
    max_timeout_s: float = 3600.0,
    times: SseTimes | None = None,
) -> web.Application:
    """All public routes. Serve it with io/http_server, which sees to disconnects and keep-alive.

    codec_of: the tokenizer of a card, cached by the caller.  overview: the cluster as the Master
    sees it (members: io/dashboard).  placement: the candidates a request had, or None.  Where the
    Master is elsewhere both are not given: its dashboard is where it is.  ready: whether a model
    can be served now (may raise ApiError: why not); else the overview's workers say so.  clients:
    False leaves out their routes.  secret: seeds the block hashes.  api_key, tenants (key -> tenant
    name), admin_key: io/http_auth.
    """
    keys = Keys(api_key, admin_key, tenants or {})
    served = Served(lambda: frontend.models, codec_of)
    limits = Limits(
        secret=secret,
        algorithm=hash_algorithm(tenants),
        default_timeout_s=default_timeout_s,
        max_timeout_s=max_timeout_s,
    )
    generate = Generate(frontend, served, keys, metrics, limits=limits, times=times or SseTimes())
    models = Models(served)
    metrics.watch(overview)

    def served_now() -> bool:
        if ready is not None:
            return ready()
        workers = overview()["workers"] if overview is not None else ()
        return any(worker["state"] == "ready" for worker in workers)

    async def health(request: web.Request) -> web.Response:
        """Ready: some worker can take a request, and this server takes it."""
        if frontend.draining:
            raise stopping()
        if not served_now():
            raise no_worker()
        return web.json_response({"status": "ready"})

    async def root(request: web.Request) -> web.Response:
        """A browser wants the dashboard, anybody else the list of what there is."""
        if overview is not None and "text/html" in request.headers.get("Accept", ""):
            return web.Response(status=302, headers={"Location": "/dashboard"})
        paths = sorted({resource.canonical for resource in request.app.router.resources()})
        shown = [path for path in paths if not path.startswith(INTERNAL)]
        return web.json_response({"name": "rtp", "routes": shown})

    async def live(request: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def exposition(request: web.Request) -> web.Response:
        keys.check_metrics(request)
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        parts = []
        for part in metrics.slices():
            parts.append(part)
            await asyncio.sleep(0)
        return web.Response(body=b"".join(parts), headers=headers)

    async def placed(request: web.Request) -> web.Response:
        assert placement is not None
        found = placement(request.match_info["id"])
        if found is None:
            raise ApiError(404, "Nothing is known of this request", code="request_not_found")
        chosen = next((c for c in found.get("candidates", ()) if c["chosen"]), None)
        body = msgspec.json.encode({"chosen": chosen, **found})
        return web.Response(body=body, content_type="application/json")

    def with_key(route: Route) -> Route:
        @functools.wraps(route)
        async def checked(request: web.Request) -> web.StreamResponse:
            keys.tenant(request)
            return await route(request)

        return checked

    def for_admin(route: Route) -> Route:
        @functools.wraps(route)
        async def checked(request: web.Request) -> web.StreamResponse:
            keys.check_admin(request)
            return await route(request)

        return checked

    app = web.Application(client_max_size=max_body_bytes, middlewares=[account(metrics)])
    app.on_response_prepare.append(echo_request_id)
    app.add_routes(
        [
            web.get("/", root),
            web.get("/health", health),
            web.get("/live", live),
            web.get("/metrics", exposition),
        ]
    )
    if placement is not None:
        app.add_routes([web.get("/v1/requests/{id}/placement", for_admin(placed))])
    if overview is not None:
        dashboard = Dashboard(overview, metrics)
        app.add_routes(
            [
                web.get("/dashboard", for_admin(dashboard.page)),
                web.get("/dashboard/data.json", for_admin(dashboard.data)),
            ]
        )
    if not clients:
        return app
    app.add_routes(
        [
            web.post("/v1/completions", generate.completions),
            web.post("/v1/chat/completions", generate.chat),
            web.get("/v1/models", with_key(models.listed)),
            web.get("/v1/models/{model:.+}", with_key(models.one)),
        ]
    )
    for base in ("", "/v1"):
        app.add_routes(
            [
                web.post(f"{base}/tokenize", with_key(models.tokenize)),
                web.post(f"{base}/detokenize", with_key(models.detokenize)),
                web.get(f"{base}/tokenizer_info", with_key(models.tokenizer_info)),
            ]
        )
    return app

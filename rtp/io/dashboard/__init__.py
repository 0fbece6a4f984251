"""The dashboard: one static page that polls one JSON.

The JSON is {"overview": ..., "recent": ...}. `recent` is io/recent's snapshot. `overview` is made
by the Master: "workers": [{"worker_id", "model", "role", "state", "ranks": [{"rank", "running",
"waiting", "prefill_tokens", "decode_rows", "context_tokens", "kv_free", "kv_total", ...}]}],
"queue": {"requests", "tokens"}, "placements": [{"request_id", "worker_id", "rank", "reason", ...}].
A worker that can take requests has the state "ready". Members that are missing are not shown.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import msgspec
from aiohttp import web

from rtp.io.metrics import Metrics
from rtp.io.metrics_master import Overview

PAGE = resources.files(__package__).joinpath("page.html").read_bytes()
HEADERS = {
    # The page needs nothing but itself and its JSON; the browser holds it to that.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Dashboard:
    """GET /dashboard and /dashboard/data.json."""

    def __init__(self, overview: Callable[[], Overview], metrics: Metrics) -> None:
        self._overview = overview
        self._metrics = metrics

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(body=PAGE, content_type="text/html", charset="utf-8", headers=HEADERS)

    async def data(self, request: web.Request) -> web.Response:
        body = {"overview": self._overview(), "recent": self._metrics.recent.snapshot()}
        return web.Response(
            body=msgspec.json.encode(body),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

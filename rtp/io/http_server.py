"""aiohttp's server as we want it: clients that leave, kept connections, errors of one shape, hot
routes in front (io/fast_http)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from rtp.io.errors_http import ApiError, of_http
from rtp.io.fast_http import FastHttp, Find

KEEPALIVE_S = 900.0
"""Idle time of a kept connection: longer than the pools of clients and proxies, so that the client
is the one to close it and no request meets a closing server (cases O07)."""

FIRST_REQUEST_S = 60.0
"""A connection that has sent no whole head by then is closed: without it, one that drips bytes is
kept for ever. Later heads are bounded by the keep-alive time."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HotRoutes:
    """What io/fast_http answers itself: see Find there; `stems` begin their request lines."""

    find: Find
    stems: tuple[bytes, ...]


def make_runner(app: web.Application, hot: HotRoutes | None = None) -> web.AppRunner:
    """A runner that cancels a handler as soon as its client is gone (cases O03, O04).

    Packed bodies reach the handlers as they came (io/http_body): those that are refused unread are
    not unpacked only to be thrown away.
    """
    return Runner(
        app,
        hot,
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_S,
        auto_decompress=False,
        access_log=None,  # http_account writes one line per request
    )


class _Connection(RequestHandler):
    """Answers what no route ever sees (bytes that are no HTTP) with our error object, and waits no
    longer than FIRST_REQUEST_S for a first request."""

    __slots__ = ("_patience",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(FIRST_REQUEST_S, self._first_request_due)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._patience.cancel()
        super().connection_lost(exc)

    def _first_request_due(self) -> None:
        if not self._request_count:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("part of an answer is out already")
        if status < 500:
            # The parser's first line is its reason; the rest quotes the client's bytes.
            reason = (message or "").partition("\n")[0].rstrip(": ")[:200]
            error = ApiError(status, f"This is not valid HTTP: {reason}", code="invalid_http")
            log.info("request.unreadable", reason=reason)
        else:
            error = ApiError(status, "The server had an error", code="internal_error")
            log.error("connection.crashed", exc_info=exc)
        response = error.response()
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised before the middlewares, such as 417
            resp = of_http(resp).response()
        return await super().finish_response(request, resp, start_time)


class _Server(web.Server):
    hot: HotRoutes | None = None

    def __init__(self, *args: Any, **options: Any) -> None:  # Any: handed on as they are
        super().__init__(*args, **options)
        self._fast: set[FastHttp] = set()

    def __call__(self) -> RequestHandler:
        if self.hot is None:
            return self._slow()
        # A protocol is all that loops want of a server's factory.
        fast: Any = FastHttp(
            self.hot.find, self.hot.stems, self._slow, self._fast, keepalive_s=KEEPALIVE_S
        )
        return fast  # type: ignore[no-any-return]

    def pre_shutdown(self) -> None:
        super().pre_shutdown()
        for connection in list(self._fast):
            connection.close()

    async def shutdown(self, timeout: float | None = None) -> None:
        await super().shutdown(timeout)
        for connection in list(self._fast):
            connection.abort()

    def _slow(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """An AppRunner whose connections are those of this file."""

    def __init__(self, app: web.Application, hot: HotRoutes | None = None, **options: Any) -> None:
        super().__init__(app, **options)
        self._hot = hot

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        # aiohttp names the class of its connections in code; there is no option for another.
        options: dict[str, Any] = server._kwargs
        ours = _Server(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            loop=server._loop,
            **options,
        )
        ours.hot = self._hot
        return ours

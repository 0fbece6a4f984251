"""Around every request: exceptions become error objects, ends are counted and logged."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rtp.io.errors_http import ApiError, of_bug, of_http
from rtp.io.metrics import Metrics

REQUEST_ID = "X-Request-Id"
MAX_ID = 256


@dataclass(frozen=True, slots=True)
class End:
    """How a stream ended after its 200 was sent."""

    outcome: str
    error: ApiError | None = None


GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})
INTERNAL = "/internal/"
"""Routes for our own processes, which tell of their troubles themselves: no requests of clients."""
FACTS = web.RequestKey("facts", dict[str, object])
"""What the log line of a request says beside its status."""
END = web.RequestKey("end", End)

log = structlog.get_logger(__name__)


def account(metrics: Metrics) -> Middleware:
    """The outermost middleware. Counts per route of ours; everything else is "other"."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            _ended(metrics, request, 499, End("disconnected"))
            raise
        except ApiError as error:
            return _answer(metrics, request, error)
        except web.HTTPException as error:
            answer = _answer(metrics, request, of_http(error))
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
            return answer
        except Exception:
            return _answer(metrics, request, of_bug(log))
        end = request.get(END) or End("ok" if response.status < 400 else "refused")
        _ended(metrics, request, 499 if end.outcome == "disconnected" else response.status, end)
        return response

    return middleware


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: the client's X-Request-Id, or one of ours. Never an internal key."""
    given = request.headers.get(REQUEST_ID, "")
    own = (request.get(FACTS) or {}).get("request_id") or uuid.uuid4().hex
    response.headers[REQUEST_ID] = given if usable_id(given) else str(own)


def usable_id(given: str) -> bool:
    """Whether a client's X-Request-Id can be echoed."""
    return 0 < len(given) <= MAX_ID and given.isascii() and given.isprintable()


def _answer(metrics: Metrics, request: web.Request, error: ApiError) -> web.Response:
    if error.status == 413:
        metrics.bodies_too_large.inc()
    _ended(metrics, request, error.status, End(error.outcome, error))
    return error.response()


def _ended(metrics: Metrics, request: web.Request, status: int, end: End) -> None:
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "other"
    if route.startswith(INTERNAL):
        return
    metrics.request(route, end.outcome, status, generates=route in GENERATING)
    facts = dict(request.get(FACTS) or {})
    if end.error is not None:
        metrics.refused(end.error.code)
        facts |= {"code": end.error.code, "reason": end.error.message, "param": end.error.param}
    # Probes and pollers would drown the log; what generates or is refused would not.
    tell = log.info if facts else log.debug
    tell("request.ended", route=route, status=status, outcome=end.outcome, **facts)

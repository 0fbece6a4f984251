"""What goes wrong, as clients see it: one JSON error object, with the status that SDKs act upon."""

from __future__ import annotations

import math

import msgspec
import structlog
from aiohttp import web

from rtp.core.commands import Failed
from rtp.core.errors import RtpError

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Error types by status; other 4xx are invalid_request_error, 5xx server_error."""
MAX_RETRY_AFTER_S = 600.0


class ApiError(RtpError):
    """A request ends with this status and error object. `message` is for the caller's eyes."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """`{"error": {...}}`, all four members always present."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    @property
    def outcome(self) -> str:
        """For counting: what could not be taken was refused, what broke has failed."""
        return "refused" if self.status < 500 or self.status == 503 else "failed"

    def headers(self) -> dict[str, str]:
        """429 and 503 always say when to come back."""
        headers = {}
        if self.status in (429, 503):
            wait_s = min(max(self.retry_after_s or 1.0, 1.0), MAX_RETRY_AFTER_S)
            headers["Retry-After"] = str(math.ceil(wait_s))
        if self.status == 401:
            # A browser asks for the key by this scheme; SDKs send theirs as Bearer.
            headers["WWW-Authenticate"] = 'Basic realm="rtp", charset="UTF-8"'
        return headers

    def response(self) -> web.Response:
        """The HTTP answer."""
        return web.Response(
            status=self.status,
            body=self.body(),
            content_type="application/json",
            headers=self.headers(),
        )


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400, naming the field."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, what: str) -> ApiError:
    """400 for what the API defines and this server does not do; nothing is ignored in silence."""
    return ApiError(400, f"{what} is not supported", param=param, code="unsupported_parameter")


def model_not_found(model: str) -> ApiError:
    return ApiError(
        404, f"The model {model[:200]!r} does not exist", param="model", code="model_not_found"
    )


def context_exceeded(param: str, limit: int, what: str) -> ApiError:
    """400 with both numbers: the model's context, and in `what` the caller's."""
    message = f"The model's context is {limit} tokens; {what}"
    return invalid(param, message, "context_length_exceeded")


def no_worker() -> ApiError:
    return ApiError(503, "No worker is ready to serve", code="service_unavailable")


def master_away() -> ApiError:
    """Of a frontend that is apart."""
    return ApiError(503, "The Master does not answer", code="service_unavailable")


def stopping() -> ApiError:
    return ApiError(503, "The server is stopping", code="service_unavailable")


def of_failed(failed: Failed) -> ApiError:
    """A request's own end, in the core's words, which name no inner address (cases O11)."""
    error = ApiError(
        failed.status,
        failed.message,
        code=failed.code or None,
        retry_after_s=failed.retry_after_s,
    )
    error.type = failed.type or error.type
    return error


def of_bug(log: structlog.stdlib.BoundLogger) -> ApiError:
    """An exception nobody expected, being handled: it goes to the log, the client gets a 500."""
    log.exception("request.crashed")
    return ApiError(
        500, "The server had an error while processing the request", code="internal_error"
    )


def of_http(error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals (route, method, size) in the same shape."""
    text = {
        404: "No such route",
        405: "This method is not allowed here",
        413: "The request body is too large",
    }.get(error.status, error.reason)
    return ApiError(error.status, text)

"""How a request's bad end is told to its client: status, type, code and a clean text.

Where it happened and why in detail is for the log, never for the client.
"""

from __future__ import annotations

from rtp.core.commands import Failed
from rtp.core.messages import Refuse, Rejected
from rtp.core.types import RequestId

TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    499: "invalid_request_error",
}
SERVER_ERROR = "server_error"

REASONS: dict[str, tuple[int, str, str]] = {
    "deadline": (504, "timeout", "The request did not finish within its time limit."),
    "too_long": (
        400,
        "context_length_exceeded",
        "The prompt and max_tokens together exceed the model's context.",
    ),
    "slow_reader": (499, "slow_reader", "The client read the stream too slowly."),
    "non_finite": (500, "numeric_fault", "The model produced values that are not finite."),
}
"""Final rejections of a worker: reason -> status, code, message."""


def failed(
    request_id: RequestId,
    status: int,
    code: str,
    message: str,
    retry_after_s: float | None = None,
) -> Failed:
    kind = TYPES.get(status, SERVER_ERROR)
    return Failed(request_id, status, kind, code, message, retry_after_s)


def refused(refusal: Refuse) -> Failed:
    return failed(
        refusal.request_id,
        refusal.status,
        refusal.code,
        refusal.reason,
        refusal.retry_after_s,
    )


def rejected(rejection: Rejected) -> Failed:
    status, code, message = REASONS.get(
        rejection.reason, (500, "internal_error", "The request could not be completed.")
    )
    return failed(rejection.request_id, status, code, message)


def timed_out(request_id: RequestId) -> Failed:
    return failed(request_id, *REASONS["deadline"])


def numeric_fault(request_id: RequestId) -> Failed:
    return failed(request_id, *REASONS["non_finite"])


def no_worker(request_id: RequestId) -> Failed:
    return failed(
        request_id,
        503,
        "service_unavailable",
        "The workers that ran this request were lost; please try again.",
        retry_after_s=1.0,
    )

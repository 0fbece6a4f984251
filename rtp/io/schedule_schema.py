"""Bodies of the router-only routes.

Typed decoding, for these routes are hot. `null` means unset and unknown fields are ignored, as on
all routes; every refusal is a 400 that names the field.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from rtp.io.errors_http import invalid
from rtp.io.hash_lists import NULL

MOST_LEASE_S = 3600.0

Count = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Lease = Annotated[float, Meta(ge=0.1, le=MOST_LEASE_S)]
Name = Annotated[str, Meta(max_length=256)]
B = TypeVar("B", bound="Body")
_FIELD = re.compile(r" - at `\$\.(\w+)")


class Body(msgspec.Struct, frozen=True, gc=False):
    """Base."""


class ScheduleBody(Body, frozen=True):
    """POST /v1/schedule."""

    model: str | None = None
    hashes: msgspec.Raw = NULL
    """See io/hash_lists."""
    token_ids: list[int] | None = None
    num_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    priority: int | None = None
    chat_id: str | None = None
    cache_salt: str | None = None
    exclude: Annotated[list[Name], Meta(max_length=64)] | None = None
    wait: bool | Annotated[float, Meta(ge=0, le=86400)] | None = None
    """False (or 0) binds at once; a number is the longest wait in seconds."""
    timeout_s: Seconds | None = None
    lease_s: Lease | None = None
    request_id: Name | None = None
    """Of an open grant that is to be placed anew."""


class DoneBody(Body, frozen=True):
    """POST /v1/schedule/{id}/done."""

    outcome: str | None = None
    attempt: Count | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    generated_tokens: Count | None = None
    prefill_s: Seconds | None = None


class WorkerBody(Body, frozen=True):
    """PUT /v1/schedule/workers/{id}: an engine of somebody else."""

    model: Name
    address: Annotated[str, Meta(min_length=1, max_length=256)]
    block_size: Annotated[int, Meta(ge=1, le=65536)]
    kv_tokens: Annotated[int, Meta(ge=1, lt=2**40)]
    max_model_len: Annotated[int, Meta(ge=1, lt=2**31)]
    ranks: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max_requests: Count | None = None
    max_batch_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    profile: Annotated[list[float], Meta(min_length=6, max_length=6)] | None = None
    silence_s: Annotated[float, Meta(ge=1, le=86400)] | None = None
    cache_events: bool | None = None
    tails_leave_first: bool | None = None


class CacheChange(Body, frozen=True):
    """What one rank gained and lost; `removed` comes before `stored`."""

    rank: Count | None = None
    tier: Literal["device", "host", "store"] | None = None
    stored: msgspec.Raw = NULL
    removed: msgspec.Raw = NULL


class CacheBody(Body, frozen=True):
    """POST /v1/schedule/workers/{id}/cache."""

    changes: list[CacheChange] | None = None
    cleared: bool | None = None
    """All that the worker held, on every rank, was gone before `changes`."""


class RenewBody(Body, frozen=True):
    """POST /v1/schedule/{id}/renew."""

    lease_s: Lease | None = None
    attempt: Count | None = None
    prefilled: bool | None = None


def parse(decoder: msgspec.json.Decoder[B], body: bytes) -> B:
    """Raises ApiError 400 for what is no JSON, or not of this shape."""
    try:
        return decoder.decode(body or b"{}")
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        raise invalid(found[1] if found else None, f"{error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(None, f"The body is not valid JSON: {error}", "invalid_json") from None

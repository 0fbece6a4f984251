"""What every route needs of a request: its JSON bytes, its headers, the model it names."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Mapping

from aiohttp import web

from rtp.core.card import ModelCard
from rtp.io.errors_http import ApiError, invalid, model_not_found, no_worker
from rtp.io.openai_prompts import TextCodec

BODY_S = 120.0
"""What a body may take to arrive, so that nobody holds a connection by sending nothing."""
PLAIN = frozenset({"", "identity"})
CODINGS = PLAIN | {"gzip", "x-gzip", "deflate"}
_ANY_HEADER = zlib.MAX_WBITS | 32


class Served:
    """The models there are, each with its tokenizer.

    models: a live view.  codec_of: the tokenizer of a card; asked again each time, so it caches.
    """

    def __init__(
        self,
        models: Callable[[], Mapping[str, ModelCard]],
        codec_of: Callable[[ModelCard], TextCodec],
    ) -> None:
        self._models = models
        self._codec_of = codec_of

    def cards(self) -> list[ModelCard]:
        models = self._models()
        return [models[name] for name in sorted(models)]

    def find(self, name: str | None) -> tuple[ModelCard, TextCodec]:
        """The named model, or the only one. Raises ApiError 404, 400; 503 while there is none."""
        models = self._models()
        if not models:
            raise no_worker()
        if name is None:
            if len(models) > 1:
                raise invalid("model", f"model is missing; there are {', '.join(sorted(models))}")
            (name,) = models
        card = models.get(name)
        if card is None:
            raise model_not_found(name)
        return card, self._codec_of(card)


async def read_json(request: web.Request) -> bytes:
    """The body, unpacked. Raises ApiError 415 for another content type or coding, 413 over the
    limit, 408 for one that takes longer than BODY_S, 400 for a broken one."""
    if "Content-Type" in request.headers:
        kind = request.content_type
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, "Content-Type must be application/json")
    coding = request.headers.get("Content-Encoding", "").strip().lower()
    if coding not in CODINGS:
        raise ApiError(415, "Content-Encoding must be gzip, deflate or identity")
    limit = request.client_max_size
    if limit and (request.content_length or 0) > limit:
        raise body_too_large(limit)
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError:
        raise ApiError(
            408, f"The body did not arrive within {BODY_S:g} s", code="timeout"
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise body_too_large(limit) from None
    except web.RequestPayloadError:
        raise invalid(None, "The body's framing is broken", "invalid_http") from None
    if coding in PLAIN:
        return body
    return await asyncio.to_thread(_unpack, body, limit)


def _unpack(body: bytes, limit: int) -> bytes:
    """Inflates a body, to `limit` bytes and no further (0: unlimited)."""
    # Called deflate, some clients send the zlib format and some the bare stream.
    packed_as_zlib = body[:1] == b"\x1f" or (body[:1] and body[0] & 0x0F == zlib.DEFLATED)
    unpacker = zlib.decompressobj(wbits=_ANY_HEADER if packed_as_zlib else -zlib.MAX_WBITS)
    try:
        out = unpacker.decompress(body, limit + 1 if limit else 0)
    except zlib.error:
        out = b""
    if limit and len(out) > limit:
        raise body_too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise invalid(None, "The body is not what its Content-Encoding says", "invalid_body")
    return out


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is over the limit of {limit} bytes", code="body_too_large")


def header_text(request: web.Request, name: str) -> str:
    """A header as text that can be encoded again; "" when absent."""
    raw = request.headers.get(name, "")
    return raw.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def header_seconds(request: web.Request, name: str) -> float | None:
    """A header that holds seconds. Raises ApiError 400 unless it is a positive, finite number."""
    raw = request.headers.get(name)
    return None if raw is None else seconds(name, raw)


def seconds(name: str, raw: str) -> float:
    """The value of a header that holds seconds. Raises ApiError 400."""
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise invalid(name, f"{name} must be a positive number of seconds")
    return value

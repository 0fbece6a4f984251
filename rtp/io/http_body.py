"""What every route needs of a request: its JSON bytes, its headers, the model it names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from aiohttp import web

from rtp.core.card import ModelCard
from rtp.io.errors_http import ApiError, invalid, model_not_found, no_worker
from rtp.io.openai_prompts import TextCodec


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
    """The body. Raises ApiError 415 for another content type, 413 over the limit."""
    if "Content-Type" in request.headers:
        kind = request.content_type
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, "Content-Type must be application/json")
    limit = request.client_max_size
    if limit and (request.content_length or 0) > limit:
        raise body_too_large(limit)
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise body_too_large(limit) from None


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is over the limit of {limit} bytes", code="body_too_large")


def header_text(request: web.Request, name: str) -> str:
    """A header as text that can be encoded again; "" when absent."""
    raw = request.headers.get(name, "")
    return raw.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def header_seconds(request: web.Request, name: str) -> float | None:
    """A header that holds seconds. Raises ApiError 400 unless it is a positive, finite number."""
    raw = request.headers.get(name)
    if raw is None:
        return None
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise invalid(name, f"{name} must be a positive number of seconds")
    return value

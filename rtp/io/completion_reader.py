"""The stream of one /v1/completions answer as a client reads it. Whatever is not a whole and proper
answer is a failure of that request, with its reason: what a server sends is held to types and
bounds, so that no figure of a run is made of nonsense."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from rtp.io.sse_reader import Event, Events

Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
UNREADABLE = (msgspec.DecodeError, RecursionError)
"""What decoding may raise; the second for nesting without end."""
FAILED_FINISHES = frozenset({"error", "abort"})
"""How servers tell in a finish reason that there was no answer: vLLM's and SGLang's words."""


class _Choice(Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: Count | None = None


class _Usage(Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None  # Any: an object, or what servers say in its place
    object: str | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class Completion:
    """feed() it what comes, until there is an end."""

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: of the prompt."""
        self.started = False
        """Whether a token came, or a proper finish without one. A chunk without text is neither."""
        self.end: str | None = None
        """None while more is to come; "" after a whole answer; else why it failed."""
        self.cached_tokens = 0
        self._num_tokens = num_tokens
        self._events = Events()
        self._finished = False
        self._told = 0
        self._counted = 0

    @property
    def output_tokens(self) -> int:
        """By the usage; where that tells none, the chunks that had text."""
        return self._told or self._counted

    @property
    def has_usage(self) -> bool:
        return self._told > 0

    def feed(self, data: bytes) -> None:
        for event in self._events.feed(data):
            if self.end is None:
                self.end = self._take(event)

    def _take(self, event: Event) -> str | None:
        """The end, if this is it."""
        if event.name == b"error":
            return f"stream error {error_code(event.data)}"
        if event.data == b"[DONE]":
            return "" if self._finished else "ended without a finish reason"
        if not event.data:
            return None
        try:
            chunk = _CHUNK.decode(event.data)
        except UNREADABLE as error:
            return f"odd chunk: {error}"
        if chunk.error or chunk.object == "error":
            return f"stream error {error_code(event.data)}"
        for choice in chunk.choices or ():
            if choice.finish_reason in FAILED_FINISHES:
                return f"finish reason {choice.finish_reason}"
            self._finished |= bool(choice.finish_reason)
            came = len(choice.token_ids or ()) or int(bool(choice.text))
            self._counted += came
            self.started |= self._finished or came > 0
        return None if chunk.usage is None else self._take_usage(chunk.usage)

    def _take_usage(self, usage: _Usage) -> str | None:
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens if details is not None else None) or 0
        # A server's own prompt may be longer, by a first token that it adds.
        if cached > max(self._num_tokens, usage.prompt_tokens):
            return f"usage: {cached} cached of {self._num_tokens} tokens"
        self.cached_tokens = min(cached, self._num_tokens)
        self._told = usage.completion_tokens
        return None


def error_code(body: bytes) -> str:
    """Code, type or message of an error, in the OpenAI API's form or bare; "" where it is none."""
    try:
        told = msgspec.json.decode(body)
    except UNREADABLE:
        return ""
    if isinstance(told, dict):
        told = told.get("error") or told
    if isinstance(told, dict):
        told = next((told[name] for name in ("code", "type", "message") if told.get(name)), "")
    return str(told) if isinstance(told, str | int) else ""

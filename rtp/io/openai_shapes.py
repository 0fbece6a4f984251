"""The JSON objects of replies and chunks, and usage."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from rtp.core.commands import Ended
from rtp.io import logprobs as lp


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: lp.CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, lp.RankedLogprob] | None] | UnsetType = UNSET


class Message(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: lp.ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, lp.RankedLogprob] | None] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatDeltaChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: lp.ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


Choice = CompletionChoice | ChatChoice | ChatDeltaChoice


class Envelope(msgspec.Struct):
    """The outer object of whole replies and of chunks."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice]
    usage: Usage | UnsetType = UNSET


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptDetails(cached_tokens),
    )


def total_usage(ends: Sequence[Ended]) -> Usage:
    """Of a whole request: each prompt counts once, however many choices it has."""
    return usage(
        sum(end.prompt_tokens for end in ends),
        sum(end.generated for end in ends),
        sum(end.cached_tokens for end in ends),
    )

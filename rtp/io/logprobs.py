"""Log-probabilities in the two OpenAI shapes; values are the Runner's own floats, not rounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rtp.core.steps import TokenLogprobs
from rtp.io.openai_prompts import TextCodec

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot carry (cases L03)."""


class CompletionLogprobs(msgspec.Struct):
    """Four arrays of equal length. The first token of a prompt has no probability: null."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class RankedLogprob(msgspec.Struct):
    """A prompt token or an alternative to it; rank 1 is the likeliest, null where unknown."""

    logprob: float
    rank: int | None
    decoded_token: str


def finite(value: float) -> float:
    """FLOOR in place of what JSON cannot carry."""
    return value if value > FLOOR else FLOOR


def append(
    out: CompletionLogprobs,
    codec: TextCodec,
    entries: Iterable[TokenLogprobs],
    num_top: int,
    offset: int,
    *,
    skip_special: bool,
) -> int:
    """Adds tokens whose text begins at character `offset`; returns where the next one begins."""
    for entry in entries:
        out.tokens.append(codec.token_text(entry.token))
        out.token_logprobs.append(finite(entry.logprob))
        out.top_logprobs.append(top_by_text(codec, entry, num_top))
        out.text_offset.append(offset)
        offset += num_chars(codec, entry.token, skip_special=skip_special)
    return offset


def append_unscored(
    out: CompletionLogprobs, codec: TextCodec, token: int, *, skip_special: bool
) -> int:
    """Adds the first token of a prompt, at character 0."""
    out.tokens.append(codec.token_text(token))
    out.token_logprobs.append(None)
    out.top_logprobs.append(None)
    out.text_offset.append(0)
    return num_chars(codec, token, skip_special=skip_special)


def num_chars(codec: TextCodec, token: int, *, skip_special: bool) -> int:
    """Characters that begin in this token: one spread over several tokens counts with its first."""
    if skip_special and codec.is_special(token):
        return 0
    return sum((byte & 0xC0) != 0x80 for byte in codec.token_bytes(token))


def top_by_text(codec: TextCodec, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """Alternatives by text, best first, the chosen token always among them.

    Of several ids with one text the chosen keeps it, else the likeliest; others are named by id.
    """
    chosen = codec.token_text(entry.token)
    out: dict[str, float] = {}
    pairs = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
    for token, logprob in pairs:
        text = codec.token_text(token)
        if token != entry.token and (text == chosen or text in out):
            text = f"token_id:{token}"
        out[text] = finite(logprob)
    out.setdefault(chosen, finite(entry.logprob))
    return out


def for_chat(codec: TextCodec, entries: Sequence[TokenLogprobs], num_top: int) -> ChatLogprobs:
    """`choices[].logprobs` of chat."""
    return ChatLogprobs(
        [
            ChatLogprob(
                token=codec.token_text(entry.token),
                logprob=finite(entry.logprob),
                bytes=list(codec.token_bytes(entry.token)),
                top_logprobs=[
                    TopLogprob(
                        codec.token_text(token), finite(value), list(codec.token_bytes(token))
                    )
                    for token, value in zip(
                        entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True
                    )
                ],
            )
            for entry in entries
        ]
    )


def for_prompt(
    codec: TextCodec, entries: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, RankedLogprob] | None]:
    """`prompt_logprobs`: null for the first token, then alternatives and the token, by id."""
    out: list[dict[str, RankedLogprob] | None] = [None]
    for entry in entries:
        pairs = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        ranked = {
            str(token): RankedLogprob(finite(value), rank, codec.token_text(token))
            for rank, (token, value) in enumerate(pairs, 1)
        }
        own = RankedLogprob(finite(entry.logprob), None, codec.token_text(entry.token))
        ranked.setdefault(str(entry.token), own)
        out.append(ranked)
    return out

"""Log-probabilities in the two OpenAI shapes; values are the Runner's own floats, not rounded."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import msgspec

from rtp.core.steps import TokenLogprobs
from rtp.io.openai_prompts import TextCodec

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot carry (cases L03)."""
_UTF8 = codecs.getincrementaldecoder("utf-8")


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


class TextOffsets:
    """Where each token of one text begins, in characters, as tokens come.

    Follows the detokenizer, U+FFFD for bytes that are no text included. Of a character spread over
    several tokens the first begins at it, the others after it.
    """

    __slots__ = ("_codec", "_decoder", "_shown")

    def __init__(self, codec: TextCodec, start: int = 0) -> None:
        """start: characters before the first token."""
        self._codec = codec
        self._decoder = _UTF8("replace")
        self._shown = start

    def take(self, token: int, *, skip_special: bool) -> int:
        """The character at which the next token begins. skip_special: special ones show nothing."""
        part_of_character = bool(self._decoder.getstate()[0])
        begin = self._shown + part_of_character
        if not (skip_special and self._codec.is_special(token)):
            self._shown += len(self._decoder.decode(self._codec.token_bytes(token)))
        return begin


def append(
    out: CompletionLogprobs,
    codec: TextCodec,
    entries: Iterable[TokenLogprobs],
    num_top: int,
    offsets: TextOffsets,
    *,
    skip_special: bool,
) -> None:
    """Adds tokens with their scores."""
    for entry in entries:
        out.tokens.append(codec.token_text(entry.token))
        out.token_logprobs.append(finite(entry.logprob))
        out.top_logprobs.append(top_by_text(codec, entry, num_top))
        out.text_offset.append(offsets.take(entry.token, skip_special=skip_special))


def append_unscored(
    out: CompletionLogprobs,
    codec: TextCodec,
    token: int,
    offsets: TextOffsets,
    *,
    skip_special: bool,
) -> None:
    """Adds the first token of a prompt, which has no score."""
    out.tokens.append(codec.token_text(token))
    out.token_logprobs.append(None)
    out.top_logprobs.append(None)
    out.text_offset.append(offsets.take(token, skip_special=skip_special))


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

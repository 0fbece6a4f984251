"""Prompts in every form clients send -> checked token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rtp.core.card import ModelCard
from rtp.core.errors import TemplateError
from rtp.core.types import Ids
from rtp.io.chat_messages import Message, normalise
from rtp.io.errors_http import context_exceeded, invalid
from rtp.io.openai_schema import ChatBody, CompletionBody, Generation, TokenizeBody

MAX_CHOICES = 2048
"""Choices one request may ask for, over all its prompts."""
DEFAULT_COMPLETION_TOKENS = 16
MAX_TOKEN_CHARS = 256
"""More than the longest token of any vocabulary."""


class TextCodec(Protocol):
    """What the HTTP side needs of a tokenizer (io/tokenizer)."""

    async def encode_packed(self, text: str, add_special_tokens: bool = True) -> Ids: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...

    def render_chat(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, object],
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids, and the text to echo (the caller's own where it gave text)."""

    ids: Ids
    text: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4


async def completion_prompts(
    body: CompletionBody, card: ModelCard, codec: TextCodec
) -> list[Prompt]:
    """The prompts of a completion, in order. Raises ApiError naming `prompt`."""
    given = body.prompt
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list):
        raise invalid("prompt", "prompt must be a string or a list of strings or token ids")
    if not given:
        raise invalid("prompt", "prompt is empty")
    if len(given) * max(body.n, body.best_of or 1) > MAX_CHOICES:
        raise invalid("prompt", f"prompts times n may be at most {MAX_CHOICES}")
    if not (all(type(p) is str for p in given) or all(type(p) is list for p in given)):
        raise invalid("prompt", "prompt must hold only strings or only lists of token ids")
    prompts = []
    for one in given:
        if isinstance(one, str):
            _check_chars(one, body.truncate_prompt_tokens, card, "prompt")
            ids = await codec.encode_packed(one, body.add_special_tokens)
        else:
            ids = pack_checked(one, card.vocab_size, "prompt")
        if not ids:
            raise invalid("prompt", "prompt has no tokens")
        cut = _truncated(ids, body, card, DEFAULT_COMPLETION_TOKENS)
        prompts.append(Prompt(cut, one if isinstance(one, str) and cut is ids else None))
    return prompts


async def chat_prompt(body: ChatBody | TokenizeBody, card: ModelCard, codec: TextCodec) -> Prompt:
    """The prompt of a chat, by the model's template. Raises ApiError; a template may refuse."""
    text = render(body, card, codec)
    if isinstance(body, ChatBody):
        _check_chars(text, body.truncate_prompt_tokens, card, "messages")
    ids = await codec.encode_packed(text, bool(body.add_special_tokens))
    if not ids:
        raise invalid("messages", "The chat template made an empty prompt of these messages")
    if isinstance(body, ChatBody):
        ids = _truncated(ids, body, card, 1)
    return Prompt(ids)


def render(body: ChatBody | TokenizeBody, card: ModelCard, codec: TextCodec) -> str:
    """Messages -> text, by the model's own template."""
    given = body.messages
    if isinstance(given, list) and len(given) > card.max_model_len:
        # Every turn takes a token at least; reading and rendering so many would take seconds.
        what = f"you sent {len(given)} messages"
        raise context_exceeded("messages", card.max_model_len, what)
    messages = normalise(body.messages)
    if card.chat_template is None:
        raise invalid("messages", "This model has no chat template; use /v1/completions")
    resume = body.continue_final_message
    if resume and messages[-1]["role"] != "assistant":
        raise invalid("continue_final_message", "The last message is not the assistant's")
    open_turn = body.add_generation_prompt
    try:
        return codec.render_chat(
            messages,
            add_generation_prompt=(not resume) if open_turn is None else open_turn,
            continue_final_message=resume,
            kwargs=body.chat_template_kwargs,
        )
    except TemplateError as error:
        raise invalid("messages", f"The chat template refused these messages: {error}") from None


def pack_checked(ids: object, vocab_size: int, param: str) -> Ids:
    """Token ids -> int32 bytes. Raises ApiError unless each is an integer inside the vocabulary."""
    # By type: a bool is an int to isinstance.
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise invalid(param, f"{param} must hold integer token ids")
    try:
        array = np.array(ids, dtype="<i8")
        inside = not ids or (array.min() >= 0 and array.max() < vocab_size)
    except OverflowError:
        inside = False
    if not inside:
        raise invalid(
            param, f"{param} holds a token id outside the vocabulary (0 to {vocab_size - 1})"
        )
    return array.astype("<i4").tobytes()


def _check_chars(text: str, truncate: int | None, card: ModelCard, param: str) -> None:
    """Refuses what cannot fit before seconds are spent on tokenising it."""
    at_least = len(text) // MAX_TOKEN_CHARS
    if truncate is None and at_least > card.max_model_len:
        what = f"your prompt has more than {at_least}"
        raise context_exceeded(param, card.max_model_len, what)


def _truncated(ids: Ids, body: Generation, card: ModelCard, default_tokens: int) -> Ids:
    """The last truncate_prompt_tokens ids; -1 keeps what leaves room for the output."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == -1:
        wanted = default_tokens if body.output_tokens is None else body.output_tokens
        keep = max(card.max_model_len - wanted, 1)
    return ids[-4 * keep :] if 4 * keep < len(ids) else ids

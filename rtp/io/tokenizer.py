"""Text <-> token ids of one model, off the event loop where it takes long, never twice for a turn.

A conversation grows at its end, and no token spans a special token. So text is cut right after its
special tokens and each segment is encoded, and remembered, by itself: of the next turn only what is
new is encoded. A segment is encoded with the special token before it in front, since some
tokenizers treat the start of a text differently from the start of a segment.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import tokenizers

from rtp.core.card import ModelCard
from rtp.core.errors import ConfigError, TemplateError
from rtp.core.types import Ids, pack_ids, unpack_ids
from rtp.io.chat_template import ChatTemplate
from rtp.io.detokenizer import IncrementalDetokenizer, TokenBytes

ID_BYTES = 4
THREADS = 2
"""Long texts encoded at a time; the library releases the GIL meanwhile."""


class Tokenizer:
    """Everything that turns one model's text into ids and back. Used from one event loop."""

    def __init__(
        self, card: ModelCard, *, inline_chars: int = 2048, cache_bytes: int = 64 << 20
    ) -> None:
        """inline_chars: up to this much new text is encoded at once, about 1 ms; more in a thread.
        cache_bytes: bound of the remembered segments, text and ids.

        Raises ConfigError when the card's tokenizer cannot be used.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json)
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"tokenizer of {card.model}: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        spec = msgspec.json.decode(card.tokenizer_json, type=_TokenizerJson)
        self._token_bytes = TokenBytes(self._tokenizer, spec.decoder)
        self._special = frozenset(token.id for token in spec.added_tokens if token.special)
        self._cutter = _Cutter(spec.added_tokens)
        self._cache = _SegmentCache(cache_bytes)
        self._inline_chars = inline_chars
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        named = {"bos": card.bos_token, "eos": card.eos_token, "pad": card.pad_token}
        special_tokens = {f"{name}_token": text for name, text in named.items() if text is not None}
        self._template = card.chat_template and ChatTemplate(card.chat_template, special_tokens)
        self._bos = b""
        if card.add_bos and card.bos_token is not None:
            bos = self._tokenizer.token_to_id(card.bos_token)
            if bos is None:
                raise ConfigError(f"tokenizer of {card.model}: {card.bos_token} is not a token")
            self._bos = pack_ids([bos])

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text; special tokens spelled in it are parsed as such.

        add_special_tokens: start with BOS where the model wants it and the text does not have it.
        Cost: the text's length for the part not seen before; that in a thread if it is long.
        """
        return unpack_ids(await self.encode_packed(text, add_special_tokens))

    async def encode_packed(self, text: str, add_special_tokens: bool = True) -> Ids:
        """encode(), as packed int32."""
        segments = self._cutter.segments(text)
        found = {segment: self._cache.get(segment) for segment in segments}
        missing = [segment for segment, ids in found.items() if ids is None]
        if missing:
            found |= zip(missing, await self._encode_all(missing), strict=True)
        ids = b"".join(
            # All but the first segment begin with the token that the one before ends with.
            [(found[segment] or b"")[ID_BYTES if i else 0 :] for i, segment in enumerate(segments)]
        )
        if add_special_tokens and not ids.startswith(self._bos):
            return self._bos + ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A new stream of ids -> text."""
        skipped = self._special if skip_special_tokens else frozenset[int]()
        return IncrementalDetokenizer(self._token_bytes, skipped)

    def token_bytes(self, token: int) -> bytes:
        return self._token_bytes[token]

    def token_text(self, token: int) -> str:
        r"""The token as text; `bytes:\xe2\x82` for a piece of a character, as OpenAI spells it."""
        data = self._token_bytes[token]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_special(self, token: int) -> bool:
        """Whether skip_special_tokens hides it."""
        return token in self._special

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Messages -> prompt text, for encode(text, add_special_tokens=False). See ChatTemplate."""
        if not self._template:
            raise TemplateError("this model has no chat template")
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs or {},
        )

    async def _encode_all(self, segments: list[str]) -> list[Ids]:
        """Encodes and remembers segments that are not in the cache."""
        if sum(map(len, segments)) <= self._inline_chars:
            encoded = self._encode(segments)
        else:
            loop = asyncio.get_running_loop()
            encoded = await loop.run_in_executor(self._threads, partial(self._encode, segments))
        for segment, ids in zip(segments, encoded, strict=True):
            self._cache.put(segment, ids)
        return encoded

    def _encode(self, segments: list[str]) -> list[Ids]:
        # encode_batch_fast releases the GIL; encode does not.
        batch = self._tokenizer.encode_batch_fast(segments, add_special_tokens=False)
        return [pack_ids(encoding.ids) for encoding in batch]


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False

    @property
    def cuts(self) -> bool:
        """Text right after it is encoded as if the text before were not there."""
        plain = self.special and not (self.single_word or self.lstrip or self.rstrip)
        return plain and not self.normalized and self.content == self.content.strip()


class _TokenizerJson(msgspec.Struct):
    """What is read here of a tokenizer.json; the vocabulary is skipped over."""

    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None  # Any: its steps differ by kind


class _Cutter:
    """Finds special tokens as the tokenizer does: leftmost, then longest."""

    def __init__(self, added: list[_AddedToken]) -> None:
        by_length = sorted(
            (token.content for token in added if not token.normalized), key=len, reverse=True
        )
        self._pattern = re.compile("|".join(map(re.escape, by_length))) if by_length else None
        self._cuts = frozenset(token.content for token in added if token.cuts)

    def segments(self, text: str) -> list[str]:
        """Pieces of text, each but the first beginning with the token that ends the one before."""
        if self._pattern is None:
            return [text]
        pieces = []
        start = 0
        for match in self._pattern.finditer(text):
            if match[0] in self._cuts:
                pieces.append(text[start : match.end()])
                start = match.start()
        pieces.append(text[start:])
        return pieces


class _SegmentCache:
    """Segment -> ids, least recently used out first, bounded by bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._ids: OrderedDict[str, Ids] = OrderedDict()

    def get(self, segment: str) -> Ids | None:
        ids = self._ids.get(segment)
        if ids is not None:
            self._ids.move_to_end(segment)
        return ids

    def put(self, segment: str, ids: Ids) -> None:
        """One that would take more than an eighth of the room is not kept."""
        size = _size(segment, ids)
        if size > self._max_bytes // 8 or segment in self._ids:
            return
        self._ids[segment] = ids
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= _size(*self._ids.popitem(last=False))


def _size(segment: str, ids: Ids) -> int:
    return sys.getsizeof(segment) + sys.getsizeof(ids)

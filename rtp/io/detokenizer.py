"""Token ids -> bytes -> text, one token at a time.

Every token has fixed bytes, in byte-level BPE as in SentencePiece with byte fallback, so an
incremental UTF-8 decoder turns a stream into text in constant time per token: it keeps back at most
an incomplete character, and what it shows is never taken back. DecodeStream of `tokenizers` decodes
a window again and again, grows it without bound over bytes that are no text, and has no flush.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from rtp.core.errors import ConfigError

_UTF8 = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes of each token, worked out when first needed."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        """decoder: the `decoder` entry of tokenizer.json. Raises ConfigError for unknown kinds."""
        self._tokenizer = tokenizer
        self._read = _reader(decoder)
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """Empty for an id without a token, such as the padding of an embedding table."""
        data = self._known.get(token)
        if data is None:
            text = self._tokenizer.id_to_token(token)
            data = self._known[token] = b"" if text is None else self._read(text)
        return data


class IncrementalDetokenizer:
    """A core Detokenizer: pieces joined are the text that follows the prompt.

    So a SentencePiece token's leading space stays, even in the first token.
    """

    __slots__ = ("_bytes", "_decoder", "_skipped")

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int]) -> None:
        """skipped: ids that show no text."""
        self._bytes = token_bytes
        self._skipped = skipped
        self._decoder = _UTF8("replace")

    def push(self, token: int) -> str:
        return "" if token in self._skipped else self._decoder.decode(self._bytes[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _reader(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """How a vocabulary entry spells its bytes."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return _from_byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _from_sentencepiece
    raise ConfigError(
        f"the tokenizer's decoder ({', '.join(kinds) or 'none'}) is not supported; "
        "ByteLevel, ByteFallback and Metaspace are"
    )


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte, as in GPT-2: printable Latin-1 is itself, the rest are 256, 257, .."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_ALPHABET = _byte_level_alphabet()


def _from_byte_level(text: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in text])
    except KeyError:  # an added token that was never spelled in the alphabet
        return text.encode()


def _from_sentencepiece(text: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace("\u2581", " ").encode()

"""Plain JSONL with the prompts themselves: `prompt` (or `text`), or chat `messages`, a line.

`timestamp` in ms or `arrival_s`; where a line has neither, arrivals are drawn at a rate.
`output_length` or `max_tokens`, or the answer's text in `output`. `session` or `chat_id` names a
conversation, `tenant` who asks. Prompts are tokenised with the model's own tokenizer, and equal
beginnings share their blocks.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec
import tokenizers
from msgspec import Meta

from rtp.core.errors import ConfigError, TemplateError
from rtp.io.chat_template import ChatTemplate
from rtp.io.traces.files import Head, lines
from rtp.io.traces.rows import SMALL_BLOCK, Rows, Size, Trace

PROMPTS = {"prompt", "text", "messages"}


class _Line(msgspec.Struct, frozen=True):
    prompt: str | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    timestamp: float | None = None
    arrival_s: float | None = None
    output_length: int | None = None
    max_tokens: int | None = None
    output: str | None = None
    session: str | int | None = None
    chat_id: str | int | None = None
    tenant: str = ""


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | None = None
    bos_token: Any = None
    eos_token: Any = None


def fits(head: Head) -> bool:
    return bool(PROMPTS & head.keys) and "hash_ids" not in head.keys


def read(
    path: Path,
    *,
    tokenizer: Annotated[
        str, Meta(description="A tokenizer.json, or a model's folder with one; needed.")
    ] = "",
    rate: Annotated[
        float, Meta(gt=0, description="Requests a second where lines have no times.")
    ] = 1.0,
    output: Annotated[int, Meta(ge=1, description="Tokens out where a line does not say.")] = 128,
    seed: Annotated[int, Meta(description="Of the times that are drawn.")] = 0,
    block_size: Size = SMALL_BLOCK,
) -> Trace:
    """Raises ConfigError without a tokenizer that can be used."""
    if not tokenizer:
        raise ConfigError(f"{path}: prompts as text need a tokenizer: --set reader.tokenizer=FILE")
    words, blocks, rows = _Words(Path(tokenizer)), _Blocks(block_size), Rows()
    decoder, random = msgspec.json.Decoder(_Line), Random(seed)
    sessions: dict[str, int] = {}
    clock = 0.0

    def take(text: bytes) -> None:
        nonlocal clock
        line = decoder.decode(text)
        ids = words.prompt(line)
        at = line.arrival_s if line.timestamp is None else line.timestamp / 1000
        if at is None:
            at = clock = clock + random.expovariate(rate)
        named = line.session if line.session is not None else line.chat_id
        rows.add(
            at,
            len(ids),
            words.num_output(line, output),
            lambda: blocks.of(ids),
            session=-1 if named is None else sessions.setdefault(str(named), len(sessions)),
            tenant=line.tenant,
        )

    rows.take_all(lines(path), take)
    return rows.trace(path, "text", block_size)


class _Words:
    """A model's tokenizer and template, as found in its folder."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(file.read_text())
        except OSError:
            raise
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"{file}: no tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._template = _template(file.parent)

    def prompt(self, line: _Line) -> list[int]:
        """Raises ValueError where there is no prompt, or the template refuses the messages."""
        text = line.prompt if line.prompt is not None else line.text
        if text is not None:
            return self._ids(text, True)
        if not line.messages:
            raise ValueError("neither prompt, text nor messages")
        if self._template is None:
            raise ValueError("messages, but no chat template beside the tokenizer")
        try:
            text = self._template.render(
                line.messages, add_generation_prompt=True, continue_final_message=False, kwargs={}
            )
        except TemplateError as error:
            raise ValueError(str(error)) from None
        return self._ids(text, False)

    def num_output(self, line: _Line, default: int) -> int:
        if line.output is not None:
            return len(self._ids(line.output, False))
        said = line.output_length if line.output_length is not None else line.max_tokens
        return default if said is None else said

    def _ids(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids


class _Blocks:
    """Numbers of blocks by content and all before it."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._number: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, ids: list[int]) -> list[int]:
        """The last one perhaps of a partly filled block."""
        out, parent = [], -1
        for start in range(0, len(ids), self._size):
            key = parent, tuple(ids[start : start + self._size])
            parent = self._number.setdefault(key, len(self._number))
            out.append(parent)
        return out


def _template(folder: Path) -> ChatTemplate | None:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    try:
        config = msgspec.json.decode(file.read_bytes(), type=_TokenizerConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from None
    if config.chat_template is None:
        return None
    named = {"bos_token": config.bos_token, "eos_token": config.eos_token}
    texts = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items() if v}
    return ChatTemplate(config.chat_template, texts)

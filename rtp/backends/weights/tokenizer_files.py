"""What a checkpoint says about its text: tokenizer.json, chat template, special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from rtp.core.errors import WeightsError


class TokenizerFiles(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Enough to turn messages into ids and ids into text, as plain data that can travel."""

    tokenizer_json: str
    """Contents of a tokenizer.json, for tokenizers.Tokenizer.from_str."""
    chat_template: str | None
    """Jinja source, None for a model without one."""
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    eos_ids: tuple[int, ...]
    """Every id that ends an answer, ascending."""
    add_bos: bool
    """A plain prompt starts with bos_token. Chat templates write their own. To decide it here,
    encode with add_special_tokens=False."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerJson(msgspec.Struct):
    """The part of tokenizer.json that is looked at here; the vocabulary is skipped over."""

    added_tokens: list[_AddedToken] = []
    post_processor: dict[str, Any] | None = None


def read_tokenizer(directory: Path, config: dict[str, Any]) -> TokenizerFiles:
    """Reads the tokenizer of a Hugging Face directory; `config` is its config.json.

    The template is chat_template.jinja, else chat_template of tokenizer_config.json (of several
    named ones, `default`). eos ids are those of generation_config.json, else of config.json, and
    the id of the tokenizer's own eos token. Code in the directory is never run.
    Raises WeightsError when tokenizer.json is missing or a file cannot be parsed.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise WeightsError(f"{directory}: no tokenizer.json (other tokenizer formats are not read)")
    text = path.read_text(encoding="utf-8")
    try:
        parsed = msgspec.json.decode(text, type=_TokenizerJson)
    except msgspec.MsgspecError as error:
        raise WeightsError(f"{path}: {error}") from error
    settings = read_json(directory / "tokenizer_config.json", default={})
    special = read_json(directory / "special_tokens_map.json", default={}) | settings
    generation = read_json(directory / "generation_config.json", default={})
    bos, eos, pad = (_content(special.get(f"{kind}_token")) for kind in ("bos", "eos", "pad"))
    ids = {token.content: token.id for token in parsed.added_tokens}
    eos_ids = set(_as_ids(generation.get("eos_token_id", config.get("eos_token_id"))))
    if eos in ids:
        eos_ids.add(ids[eos])
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        add_bos = bos is not None and bos in _prefixed(parsed.post_processor)
    return TokenizerFiles(
        tokenizer_json=text,
        chat_template=_chat_template(directory, settings),
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        eos_ids=tuple(sorted(eos_ids)),
        add_bos=bool(add_bos) and bos is not None,
    )


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object from a file; `default` when there is no such file. Raises WeightsError."""
    if default is not None and not path.exists():
        return default
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"{path}: {error}") from error


def _content(token: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _as_ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return value if isinstance(value, list) else (value,)


def _prefixed(processor: dict[str, Any] | None) -> set[str]:
    """Special tokens that a tokenizer.json post-processor puts before a single text."""
    if processor is None:
        return set()
    if processor.get("type") == "Sequence":
        return set().union(*(_prefixed(inner) for inner in processor["processors"]))
    found = set()
    for piece in processor.get("single", ()):
        if "SpecialToken" not in piece:
            break
        found.add(piece["SpecialToken"]["id"])
    return found


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template

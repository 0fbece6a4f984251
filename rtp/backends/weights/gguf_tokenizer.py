"""Rebuilds tokenizer.json from the vocabulary and merges inside a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rtp.backends.weights.tokenizer_files import TokenizerFiles
from rtp.core.errors import WeightsError

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of GGUF that are matched in the text as a whole, before any splitting."""

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_SPLITS: dict[str, list[dict[str, Any]]] = {
    # Every digit alone, then the regular expression of GPT-2, which ByteLevel brings along.
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
}
"""How text is split before merging, by the name that GGUF files use for it."""


def rebuild_tokenizer(path: Path, metadata: dict[str, Any]) -> TokenizerFiles:
    """The tokenizer of a GGUF file in the terms of the tokenizers library.

    Byte-level BPE only. Raises WeightsError naming what is not known how to rebuild.
    """
    ggml = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind, split = ggml.get("model"), ggml.get("pre")
    if kind != "gpt2" or split not in _SPLITS:
        raise WeightsError(
            f"{path}: tokenizer {kind}/{split} cannot be rebuilt;"
            f" known are gpt2 with {', '.join(_SPLITS)}: use a folder with a tokenizer.json"
        )
    try:
        tokens, types, merges = ggml["tokens"], ggml["token_type"], ggml["merges"]
    except KeyError as error:
        raise WeightsError(f"{path}: tokenizer.ggml.{error.args[0]} is missing") from None

    if len(tokens) != len(types):
        raise WeightsError(f"{path}: {len(tokens)} tokens but {len(types)} token types")

    def token(name: str) -> str | None:
        if name not in ggml:
            return None
        if ggml[name] not in range(len(tokens)):
            raise WeightsError(f"{path}: tokenizer.ggml.{name} is {ggml[name]}, not an id")
        content: str = tokens[ggml[name]]
        return content

    bos = token("bos_token_id")
    ends = {ggml[name] for name in ("eos_token_id", "eot_token_id") if name in ggml}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": type == _CONTROL,
            }
            for id, (content, type) in enumerate(zip(tokens, types, strict=True))
            if type in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[split]},
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {content: id for id, content in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    return TokenizerFiles(
        tokenizer_json=msgspec.json.encode(tokenizer).decode(),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=bos,
        eos_token=token("eos_token_id"),
        pad_token=token("padding_token_id"),
        eos_ids=tuple(sorted(ends)),
        add_bos=bool(ggml.get("add_bos_token", False)) and bos is not None,
    )

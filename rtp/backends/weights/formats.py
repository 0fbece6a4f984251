"""One way to open a checkpoint, whatever its format: config, tensors, tokenizer, revision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from rtp.backends.weights import gguf_model, safetensors_folder
from rtp.backends.weights.gguf_header import read_gguf_header
from rtp.backends.weights.gguf_tokenizer import rebuild_tokenizer
from rtp.backends.weights.reader import WeightFile, read_in_order
from rtp.backends.weights.tokenizer_files import TokenizerFiles, read_json, read_tokenizer
from rtp.core.errors import WeightsError


class Checkpoint:
    """A checkpoint whose headers are read and checked and whose weights are not yet read."""

    def __init__(
        self,
        config: dict[str, Any],
        files: tuple[WeightFile, ...],
        tokenizer: Callable[[], TokenizerFiles],
    ) -> None:
        self.config = config
        """Keys of a Hugging Face config.json; see complete_config for those always present."""
        self.num_bytes = sum(tensor.num_bytes for file in files for tensor in file.tensors)
        """Bytes that tensors() reads."""
        self._files = files
        self._tokenizer = tokenizer
        self._revision: str | None = None

    @property
    def tokenizer(self) -> TokenizerFiles:
        """Read, or rebuilt, at each call: the processes that only compute never pay for it."""
        return self._tokenizer()

    @property
    def revision(self) -> str:
        """Names the weights: equal for equal config, layout and bytes, whatever the folder's name.

        Two models trained from the same start have the same headers, so the digest covers every
        byte. It comes for free once tensors() has been exhausted; before, this reads all files.
        """
        if self._revision is None:
            for _ in self._stored():
                pass
        assert self._revision is not None
        return self._revision

    def names(self) -> list[str]:
        """Tensor names in the order of tensors()."""
        return [tensor.name for file in self._files for tensor in file.tensors]

    def tensors(
        self, progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) in file order, each byte read once, the next reads under way.

        A tensor has its stored dtype (GGUF: float32) and belongs to the caller, who best copies it
        out and drops it. progress(bytes done, bytes in all) is called after each.
        """
        done = 0
        for name, build, num_bytes in self._stored():
            yield name, build()
            done += num_bytes
            if progress is not None:
                progress(done, self.num_bytes)

    def _stored(self) -> Iterator[tuple[str, Callable[[], torch.Tensor], int]]:
        """Reads all files, leaves building to the caller, and settles the revision at the end."""
        digest = xxhash.xxh3_128(msgspec.json.encode(self.config, order="deterministic"))
        for file in self._files:
            for tensor, data in read_in_order(file):
                digest.update(f"{tensor.name} {tensor.label}\n".encode())
                digest.update(data.data)
                yield tensor.name, partial(tensor.build, data), tensor.num_bytes
        self._revision = digest.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face directory (safetensors) or a .gguf file.

    Reads headers only. Raises WeightsError for anything missing, truncated, overlapping, unknown
    or outside the folder, with file and tensor.
    """
    if path.is_dir():
        if not (path / "config.json").exists():
            raise WeightsError(f"no config.json in {path}: not a model directory")
        config = complete_config(read_json(path / "config.json"))
        files = _without_tied_head(config, safetensors_folder.open_folder(path))
        return Checkpoint(config, files, partial(read_tokenizer, path, config))
    if not path.is_file():
        raise WeightsError(f"{path}: no such file or directory")
    if path.suffix != ".gguf":
        raise WeightsError(f"{path}: neither a directory nor a .gguf file")
    header = read_gguf_header(path)
    config = gguf_model.config_of(path, header)
    file = gguf_model.weight_file(path, header, config)
    return Checkpoint(config, (file,), partial(rebuild_tokenizer, path, header.metadata))


def complete_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json in one dialect: the keys that releases of transformers write differently.

    Afterwards num_key_value_heads, head_dim, rope_theta, rope_scaling (None or a dict with
    rope_type) and tie_word_embeddings are present wherever the model has attention heads.
    """
    config = dict(config)
    heads = config.get("num_attention_heads")
    if heads is None:
        return config
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if config.get("head_dim") is None and "hidden_size" in config:
        config["head_dim"] = config["hidden_size"] // heads
    config.setdefault("tie_word_embeddings", False)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return config  # one RoPE per kind of layer: the model's own file knows what to do with it
    config.pop("rope_parameters", None)
    rope = dict(rope)
    config["rope_theta"] = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.pop("type", rope.pop("rope_type", "default"))
    config["rope_scaling"] = None if kind == "default" else rope | {"rope_type": kind}
    return config


def _without_tied_head(
    config: dict[str, Any], files: tuple[WeightFile, ...]
) -> tuple[WeightFile, ...]:
    """Leaves out an output head that a tied model ships beside its embeddings: it is not used."""
    names = {tensor.name for file in files for tensor in file.tensors}
    if not config.get("tie_word_embeddings") or "model.embed_tokens.weight" not in names:
        return files
    return tuple(
        replace(file, tensors=tuple(t for t in file.tensors if t.name != "lm_head.weight"))
        for file in files
    )


def check_names(expected: Iterable[str], found: Iterable[str]) -> None:
    """Raises WeightsError with both lists unless the two hold the same tensor names."""
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(set(found) - set(expected))
    if missing or unexpected:
        raise WeightsError(f"tensors missing: {missing}; tensors not expected: {unexpected}")

"""A GGUF file in the terms of Hugging Face: config keys, tensor names, float32 weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.quants import dequantize

from rtp.backends.weights.gguf_header import GgufHeader, GgufTensor
from rtp.backends.weights.reader import ByteArray, StoredTensor, WeightFile
from rtp.core.errors import WeightsError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_PERMUTED = ("llama",)
"""Architectures whose q and k rows llama.cpp stores interleaved for its kind of RoPE."""
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def config_of(path: Path, header: GgufHeader) -> dict[str, Any]:
    """The keys of a config.json, from the metadata. Raises WeightsError for an unknown model."""
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise WeightsError(
            f"{path}: architecture {architecture}, known are {', '.join(_ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) > 1:
        raise WeightsError(f"{path}: one of several split GGUF files; merge them first")

    def count(key: str, default: int | None = None) -> int:
        found = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(found, int) or found <= 0:
            raise WeightsError(f"{path}: {architecture}.{key} is {found}, not a positive integer")
        return found

    def number(key: str, default: float | None = None) -> float:
        found = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(found, float) or not 0 < found < np.inf:
            raise WeightsError(f"{path}: {architecture}.{key} is {found}, not a positive number")
        # The shortest decimal that is this float32: what the original config.json said.
        return float(str(np.float32(found)))

    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise WeightsError(f"{path}: rope scaling {scaling}, known are none and linear")
    hidden, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden // heads)
    if count("rope.dimension_count", head_dim) != head_dim:
        raise WeightsError(f"{path}: RoPE over part of a head is not known")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise WeightsError(f"{path}: tensor token_embd.weight is missing")
    return {
        "model_type": architecture,
        "architectures": [_ARCHITECTURES[architecture]],
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "rope_scaling": None
        if scaling == "none"
        else {"rope_type": scaling, "factor": number("rope.scaling.factor")},
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def weight_file(path: Path, header: GgufHeader, config: dict[str, Any]) -> WeightFile:
    """The tensors under their Hugging Face names, float32 once built."""
    tensors = []
    for tensor in header.tensors:
        name = _hugging_face_name(path, tensor.name)
        num_heads = None
        if config["model_type"] in _PERMUTED:
            if ".q_proj." in name:
                num_heads = config["num_attention_heads"]
            elif ".k_proj." in name:
                num_heads = config["num_key_value_heads"]
        if num_heads is not None and tensor.shape[0] != num_heads * config["head_dim"]:
            raise WeightsError(
                f"{path}: tensor {tensor.name} of shape {list(tensor.shape)} does not hold"
                f" {num_heads} heads of {config['head_dim']}"
            )
        build = partial(_build, path=path, tensor=tensor, num_heads=num_heads)
        label = f"{tensor.type.name}{list(tensor.shape)}"
        tensors.append(StoredTensor(name, label, tensor.offset, tensor.num_bytes, build))
    return WeightFile(path, tuple(tensors), header.start, header.head)


def _build(data: ByteArray, path: Path, tensor: GgufTensor, num_heads: int | None) -> torch.Tensor:
    """Dequantises; num_heads is given for tensors whose rows are to be put in order."""
    try:
        values = dequantize(data.reshape(tensor.stored_shape), tensor.type)
    except (NotImplementedError, ValueError) as error:
        raise WeightsError(
            f"{path}: tensor {tensor.name}: {tensor.type.name} cannot be dequantised"
        ) from error
    built = torch.from_numpy(values.astype(np.float32, copy=False)).reshape(tensor.shape)
    return built if num_heads is None else _halves(built, num_heads)


def _halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from llama.cpp's order (pairs side by side) to Hugging Face's (two halves).

    weight: [num_heads * head_dim, ...]. Returns a new tensor of the same shape.
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _hugging_face_name(path: Path, name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    if stem.startswith("blk.") and block.isdigit() and part in _BLOCK_NAMES:
        return f"model.layers.{block}.{_BLOCK_NAMES[part]}.{suffix}"
    raise WeightsError(f"{path}: tensor {name} is not known")

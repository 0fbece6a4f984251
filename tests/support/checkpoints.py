"""Tiny random Hugging Face directories, built in the test process, and the one real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}
BOS, EOS, PAD = "<|start|>", "<|end|>", "<|pad|>"
"""Ids 0, 1 and 2 of the tiny tokenizer."""
VOCAB_SIZE = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a worker tells the Master which blocks it holds, and the Master tells the worker what to run",
    "what is the capital of France? The capital of France is Paris.",
    "def add(first, second): return first + second",
)


def tiny_checkpoint(
    tmp_path: Path, family: str, seed: int = 0, shards: int = 1, **config: Any
) -> Path:
    """Writes a random float32 model of 0.1 M parameters with a tokenizer; returns its directory.

    family: llama, mistral, qwen2 or qwen3.  config overrides keys of the family's config.json.
    shards above 1 spread the tensors over that many files with an index. Weights are wide enough
    (std 0.2) that greedy choices have a margin, and biases and norms are random too, so that a
    backend that forgets one is noticed. The same arguments give the same bytes.
    """
    import torch
    import transformers

    config_name, model_name = FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    model_config = getattr(transformers, config_name)(**(settings | config))
    model = getattr(transformers, model_name)(model_config).to(torch.float32)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            is_norm = parameter.dim() == 1 and name.endswith("norm.weight")
            parameter.copy_(1 + 0.1 * noise if is_norm else 0.2 * noise)

    directory = tmp_path / f"{family}-{seed}-{shards}"
    directory.mkdir(parents=True)
    model_config.architectures = [model_name]
    model_config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tensors = dict(model.state_dict())
    if model_config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    write_shards(directory, tensors, shards)
    write_tokenizer(directory)
    return directory


def poisoned_checkpoint(tmp_path: Path, family: str, token: int) -> Path:
    """tiny_checkpoint's model, but the embedding of `token` is not a number."""
    from safetensors.torch import load_file

    directory = tiny_checkpoint(tmp_path, family)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    write_shards(directory, tensors)
    return directory


def smollm2_path() -> Path:
    """The real model of the tests, fetched at first use; skips the test when it cannot be had."""
    import pytest

    from rtp.backends.weights.fetch import resolve
    from rtp.core.errors import WeightsError

    try:
        return resolve("smollm2-135m")
    except WeightsError as error:
        pytest.skip(f"smollm2-135m is not in the cache and cannot be fetched: {error}")


def write_shards(directory: Path, tensors: dict[str, Any], shards: int = 1) -> None:
    """Writes name -> tensor as model.safetensors, or as several shards with their index."""
    from safetensors.torch import save_file

    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = {name: tensors[name] for name in names[shard::shards]}
        save_file(held, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_tokenizer(directory: Path) -> None:
    """Trains a byte-level BPE of at most VOCAB_SIZE ids and writes it with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

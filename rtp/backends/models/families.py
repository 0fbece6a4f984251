"""Architecture name in a config.json -> the family that computes it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rtp.backends.models import llama, mistral, qwen2, qwen3
from rtp.backends.models.llama import Decoder
from rtp.backends.models.spec import Config, ModelSpec
from rtp.core.errors import ConfigError

FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": llama.spec,
    "MistralForCausalLM": mistral.spec,
    "Qwen2ForCausalLM": qwen2.spec,
    "Qwen3ForCausalLM": qwen3.spec,
}


def read_model(config: Config, dtype: torch.dtype) -> Decoder:
    """A decoder without weights yet. Raises ConfigError naming the field that cannot be served."""
    names = config.get("architectures") or ()
    for name in names:
        if name in FAMILIES:
            return Decoder(FAMILIES[name](config), dtype)
    raise ConfigError(
        f"config field architectures={list(names)!r} is not supported; use {', '.join(FAMILIES)}"
    )

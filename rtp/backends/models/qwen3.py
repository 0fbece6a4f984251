"""Qwen3, dense: Llama with an RMSNorm on each query and key head."""

from __future__ import annotations

from rtp.backends.models.qwen2 import upper_windows
from rtp.backends.models.spec import Config, ModelSpec, read_spec


def spec(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    windows = upper_windows(config)
    return read_spec(config, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=windows)

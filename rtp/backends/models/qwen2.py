"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in upper layers."""

from __future__ import annotations

from rtp.backends.models.spec import Config, ModelSpec, read_spec, read_windows
from rtp.core.errors import ConfigError


def spec(config: Config) -> ModelSpec:
    return read_spec(config, qkv_bias=True, windows=upper_windows(config))


def upper_windows(config: Config) -> tuple[int | None, ...]:
    """Windows from `layer_types`, or in the layers from `max_window_layers` on in older configs."""
    windowed = bool(config.get("use_sliding_window", False))
    if windowed and not config.get("layer_types"):
        first, layers = config.get("max_window_layers"), config.get("num_hidden_layers")
        if not isinstance(first, int) or not isinstance(layers, int):
            raise ConfigError("config field use_sliding_window needs max_window_layers")
        kinds = ["full_attention"] * min(first, layers)
        kinds += ["sliding_attention"] * (layers - len(kinds))
        config = {**config, "layer_types": kinds}
    return read_windows(config, windowed)

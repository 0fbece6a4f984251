"""What the numbers in a config.json mean for a decoder, and which settings we must refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rtp.core.errors import ConfigError

Config = Mapping[str, Any]
"""Keys and values of a Hugging Face config.json; the values are JSON."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions: `kind` is default, linear or llama3, `scaling` that kind's parameters."""

    theta: float
    kind: str
    scaling: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything a decoder of the Llama line needs to be built."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    """Per layer: how many positions a token sees, itself included; None for all before it."""
    tied: bool
    """The output head is the embedding table."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are RMS-normalised per head before rotation."""
    eos_ids: tuple[int, ...] = ()

    @property
    def scale(self) -> float:
        """Factor of attention scores."""
        return float(self.head_dim**-0.5)


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1, 1.0),
    "pretraining_tp": (None, 1),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_sinks": (None, False),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
}
"""Settings that change what a model computes, with the values that leave it alone."""

_ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def read_spec(config: Config, **family: Any) -> ModelSpec:
    """The spec of a config, with what the family fixes (qkv_bias, windows, ...) laid over it.

    Raises ConfigError naming the field that is missing, malformed or not supported.
    """
    for field, neutral in _NEUTRAL.items():
        if field in config and config[field] not in neutral:
            raise ConfigError(f"config field {field}={config[field]!r} is not supported")
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config field num_key_value_heads={kv_heads} does not divide {heads} heads"
        )
    hidden = _count(config, "hidden_size")
    head_dim = _count(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"config field head_dim={head_dim} is odd and cannot be rotated")
    layers = _count(config, "num_hidden_layers")
    settings: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_size": _count(config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": _count(config, "vocab_size"),
        "max_model_len": _count(config, "max_position_embeddings"),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope": read_rope(config),
        "windows": (None,) * layers,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "eos_ids": _eos_ids(config),
    }
    return ModelSpec(**(settings | family))


def read_rope(config: Config) -> RopeSpec:
    """Rotary settings, from `rope_parameters` or from `rope_theta` and `rope_scaling`."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    values = dict(config.get(field) or {})
    if any(isinstance(value, dict) for value in values.values()):
        raise ConfigError(f"config field {field} differs by layer type, which is not supported")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _ROPE_PARAMETERS:
        known = ", ".join(_ROPE_PARAMETERS)
        raise ConfigError(f"config field {field}.rope_type={kind!r} is not supported; use {known}")
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"config field {field}.partial_rotary_factor is not supported")
    missing = [name for name in _ROPE_PARAMETERS[kind] if name not in values]
    if missing:
        raise ConfigError(f"config field {field} of type {kind} lacks {', '.join(missing)}")
    theta = values.get("rope_theta") or config.get("rope_theta") or 10000.0
    scaling = {name: float(values[name]) for name in _ROPE_PARAMETERS[kind]}
    return RopeSpec(theta=float(theta), kind=kind, scaling=scaling)


def read_windows(config: Config, windowed: bool) -> tuple[int | None, ...]:
    """Window of each layer: `layer_types` decides where given, else all layers alike.

    windowed: whether the family, with this config, uses `sliding_window` at all.
    """
    layers = _count(config, "num_hidden_layers")
    window = config.get("sliding_window") if windowed else None
    kinds = config.get("layer_types") or ["sliding_attention" if window else "full_attention"]
    if len(kinds) == 1:
        kinds = list(kinds) * layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise ConfigError(f"config field layer_types is not supported: {sorted(set(kinds))}")
    if "sliding_attention" in kinds and not window:
        raise ConfigError("config field layer_types names sliding_attention without sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _count(config: Config, field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config field {field}={value!r} must be a positive integer")
    return value


def _eos_ids(config: Config) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)

"""Llama, and the decoder that Mistral, Qwen2 and Qwen3 vary: plain PyTorch, read top to bottom."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rtp.backends.model.attention import AttentionBackend
from rtp.backends.model.layers import (
    GatedMLP,
    HeadNorm,
    Linear,
    RMSNorm,
    Rotary,
    Slot,
    paired,
    rotate,
)
from rtp.backends.models.spec import Config, ModelSpec, read_spec
from rtp.core.errors import WeightsError


def spec(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return read_spec(
        config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.get("mlp_bias", False))
    )


class Decoder:
    """A decoder-only transformer: ids in, hidden states and logits out. Holds no sequence state."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype):
        self.spec = spec
        self.dtype = dtype
        self._embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype)
        self._rotary = Rotary(spec.rope, spec.head_dim)
        self._layers = [Layer(spec, dtype) for _ in range(spec.num_layers)]
        self._norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)
        self._head = Linear(spec.hidden_size, (spec.vocab_size,), dtype)

    def forward(self, ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """Last layer's output [N, hidden] before the last norm; int64 ids [N] at positions [N].

        attention: planned for this step; it keeps keys and values.
        """
        hidden = F.embedding(ids, self._embedding)
        table = self._rotary.table(positions)
        for index, layer in enumerate(self._layers):
            hidden = layer(index, hidden, table, attention)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] for rows [S, hidden] of forward's result."""
        return self._head(self._norm(hidden)).float()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies each named tensor to its place, in whatever order they come.

        Raises WeightsError, naming the tensor, for one that is unknown, misshapen, given twice or
        missing. A head that a tied model ships beside its embedding is left out.
        """
        slots, found = self._slots(), set()
        for name, tensor in tensors:
            if name.endswith("rotary_emb.inv_freq") or (
                self.spec.tied and name == "lm_head.weight"
            ):
                continue
            if name not in slots:
                raise WeightsError(f"tensor {name} has no place in this model")
            if tuple(tensor.shape) != slots[name].shape:
                raise WeightsError(
                    f"tensor {name} has shape {tuple(tensor.shape)}, not {slots[name].shape}"
                )
            if name in found:
                raise WeightsError(f"tensor {name} was given twice")
            slots[name].put(tensor)
            found.add(name)
        missing = sorted(slots.keys() - found)
        if missing:
            raise WeightsError(f"{len(missing)} tensors are missing: {', '.join(missing[:8])}")

    def _slots(self) -> dict[str, Slot]:
        head = self._head.weight_slot(0)
        embedding = Slot(head.shape, partial(self._put_embedding, head))
        slots = {"model.embed_tokens.weight": embedding, "model.norm.weight": self._norm.slot()}
        if not self.spec.tied:
            slots["lm_head.weight"] = head
        for index, layer in enumerate(self._layers):
            for name, slot in layer.slots().items():
                slots[f"model.layers.{index}.{name}"] = slot
        return slots

    def _put_embedding(self, head: Slot, value: Tensor) -> None:
        self._embedding.copy_(value)
        if self.spec.tied:
            head.put(value)


class Layer:
    """Attention, then MLP, each on a normalised input and added to the residual stream."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype):
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._spec = spec
        self._attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)
        self._mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)
        self._qkv = Linear(
            spec.hidden_size, (heads * dim, kv_heads * dim, kv_heads * dim), dtype, spec.qkv_bias
        )
        self._head_norm = (
            HeadNorm(heads, kv_heads, dim, spec.norm_eps, dtype) if spec.qk_norm else None
        )
        self._o = Linear(heads * dim, (spec.hidden_size,), dtype, spec.o_bias)
        self._mlp = GatedMLP(spec.hidden_size, spec.ffn_size, dtype, spec.mlp_bias)

    def __call__(
        self, index: int, hidden: Tensor, table: Tensor, attention: AttentionBackend
    ) -> Tensor:
        spec = self._spec
        qkv = self._qkv(self._attention_norm(hidden)).unflatten(-1, (-1, spec.head_dim))
        rotating = qkv[:, : spec.num_heads + spec.num_kv_heads]
        if self._head_norm is not None:
            self._head_norm(rotating)
        rotate(rotating, table)
        hidden = self._o.add_to(hidden, attention.forward(index, qkv))
        return self._mlp.add_to(hidden, self._mlp_norm(hidden))

    def slots(self) -> dict[str, Slot]:
        """Names below `model.layers.<index>.` and where they go."""
        spec = self._spec
        queries = partial(paired, num_heads=spec.num_heads)
        keys = partial(paired, num_heads=spec.num_kv_heads)
        slots = {
            "input_layernorm.weight": self._attention_norm.slot(),
            "post_attention_layernorm.weight": self._mlp_norm.slot(),
            "self_attn.q_proj.weight": self._qkv.weight_slot(0, queries),
            "self_attn.k_proj.weight": self._qkv.weight_slot(1, keys),
            "self_attn.v_proj.weight": self._qkv.weight_slot(2),
            "self_attn.o_proj.weight": self._o.weight_slot(0),
            "mlp.gate_proj.weight": self._mlp.gate_up.weight_slot(0),
            "mlp.up_proj.weight": self._mlp.gate_up.weight_slot(1),
            "mlp.down_proj.weight": self._mlp.down.weight_slot(0),
        }
        if spec.qkv_bias:
            slots["self_attn.q_proj.bias"] = self._qkv.bias_slot(0, queries)
            slots["self_attn.k_proj.bias"] = self._qkv.bias_slot(1, keys)
            slots["self_attn.v_proj.bias"] = self._qkv.bias_slot(2)
        if spec.o_bias:
            slots["self_attn.o_proj.bias"] = self._o.bias_slot(0)
        if spec.mlp_bias:
            slots["mlp.gate_proj.bias"] = self._mlp.gate_up.bias_slot(0)
            slots["mlp.up_proj.bias"] = self._mlp.gate_up.bias_slot(1)
            slots["mlp.down_proj.bias"] = self._mlp.down.bias_slot(0)
        if self._head_norm is not None:
            slots["self_attn.q_norm.weight"] = self._head_norm.query_slot()
            slots["self_attn.k_norm.weight"] = self._head_norm.key_slot()
        return slots

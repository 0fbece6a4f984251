"""Runner on the CPU, in PyTorch alone: serves small models and checks the other Runners."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rtp.backends.model.attention import TorchAttention
from rtp.backends.model.kv_pool import KVPool, PageShape
from rtp.backends.model.runner import ModelRunner
from rtp.backends.models.families import read_model
from rtp.backends.models.llama import Decoder
from rtp.backends.models.spec import Config
from rtp.backends.weights.fetch import resolve
from rtp.backends.weights.formats import open_checkpoint
from rtp.core.errors import ConfigError
from rtp.core.ports import Capacity

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_DEFAULT_KV_BYTES = 1 << 30


def check() -> list[str]:
    """Reasons why this backend cannot run here; empty is yes."""
    if not torch.backends.mkldnn.is_available():
        return ["this build of torch has no oneDNN, which multiplies packed weights"]
    return []


def build(
    *,
    checkpoint: str | Path,
    dtype: str = "auto",
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    block_size: int = 16,
    threads: int | None = None,
    max_model_len: int | None = None,
) -> ModelRunner:
    """Loads a checkpoint (a Hugging Face directory, a .gguf file or a known name) into a Runner.

    dtype: "bf16", "fp32", or "auto": bf16 where the CPU multiplies it natively, else fp32.
    The pool has num_blocks pages, or as many as kv_bytes hold (1 GiB if neither is given); memory
    is taken as pages are first used. threads: of torch, in this whole process. max_model_len
    shortens the model's own limit. Raises ConfigError and WeightsError.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    source = open_checkpoint(resolve(str(checkpoint)))
    model = load_model(source.config, source.tensors(), dtype)
    return make_runner(
        model,
        source.revision,
        num_blocks=num_blocks,
        kv_bytes=kv_bytes,
        block_size=block_size,
        max_model_len=max_model_len,
    )


def load_model(config: Config, tensors: Iterable[tuple[str, Tensor]], dtype: str) -> Decoder:
    """A decoder with its weights, from named tensors in any order and dtype."""
    with torch.inference_mode():
        model = read_model(config, _torch_dtype(dtype))
        model.load(tensors)
    return model


def make_runner(
    model: Decoder,
    revision: str,
    *,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    block_size: int = 16,
    max_model_len: int | None = None,
) -> ModelRunner:
    """A Runner with a fresh pool over a loaded decoder; parameters as for build."""
    spec = model.spec
    shape = PageShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, model.dtype)
    if num_blocks is None:
        num_blocks = (_DEFAULT_KV_BYTES if kv_bytes is None else kv_bytes) // shape.num_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"num_blocks={num_blocks}: kv_bytes={kv_bytes} with pages of {shape.num_bytes} bytes"
        )
    pool = KVPool(shape, num_blocks)
    capacity = Capacity(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=min(spec.max_model_len, max_model_len or spec.max_model_len),
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_ids,
        kv_format=_kv_format(shape, revision),
        revision=revision,
    )
    attention = TorchAttention(pool, spec.num_heads, spec.scale, spec.windows)
    return ModelRunner(model, pool, attention, capacity)


def _torch_dtype(name: str) -> torch.dtype:
    if name == "auto":
        name = "bf16" if _multiplies_bf16() else "fp32"
    if name not in _DTYPES:
        raise ConfigError(f"dtype={name!r} is not supported on the CPU; use auto, bf16 or fp32")
    return _DTYPES[name]


def _multiplies_bf16() -> bool:
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


def _kv_format(shape: PageShape, revision: str) -> str:
    """Layout and dtype; the revision stands for weights, rotation and windows."""
    planes = f"{shape.num_layers}x{2 * shape.num_kv_heads}x{shape.block_size}x{shape.head_dim}"
    dtype = str(shape.dtype).removeprefix("torch.")
    return f"layer-plane-slot-paired/{planes}/{dtype}/{revision}"

"""Every family against transformers on tiny random weights: logits within rounding, same tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp.backends.models.qwen2 import upper_windows
from rtp.backends.models.spec import read_rope
from rtp.backends.torch_cpu import build, load_model
from rtp.backends.weights.formats import open_checkpoint
from rtp.core.errors import ConfigError, WeightsError
from rtp.core.types import SamplingParams
from tests.support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from tests.support.runners import Driver

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-head-dim": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}
NUM_PROMPT, NUM_OUTPUT = 150, 12
SCORED = SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=VOCAB_SIZE)


def a_prompt(seed: int, length: int = NUM_PROMPT) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=draw).tolist()


def reference(path: Path) -> Any:  # Any: transformers has no precise types
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("case", CASES)
def test_family_agrees_with_transformers(tmp_path: Path, case: str):
    """Prefill of 150 tokens and 12 decode steps. Logits of size 10 summed in another order differ
    by about 1e-5; a wrong mask, rotation or bias by more than 0.1."""
    family, config = CASES[case]
    path = tiny_checkpoint(tmp_path, family, **config)
    driver = Driver(build(checkpoint=path, dtype="fp32", num_blocks=64))
    request = driver.begin(a_prompt(1), SCORED)
    driver.run([request], NUM_OUTPUT)
    with torch.inference_mode():
        ids = torch.tensor([request.prompt + request.output[:-1]])
        expected = reference(path)(ids).logits[0, NUM_PROMPT - 1 :].log_softmax(-1)
    assert request.output == expected.argmax(-1).tolist()
    for row, line in zip(request.results, expected, strict=True):
        assert row.logprobs is not None
        found = torch.empty(VOCAB_SIZE)
        found[list(row.logprobs.top_ids)] = torch.tensor(row.logprobs.top_logprobs)
        torch.testing.assert_close(found, line, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bf16_stays_near_float32(tmp_path: Path, family: str):
    """bf16 keeps 8 bits: log-probabilities down to -12, through two layers, are off by 0.03 on
    average and 0.12 at most."""
    path = tiny_checkpoint(tmp_path, family)
    found = []
    for dtype in ("fp32", "bf16"):
        driver = Driver(build(checkpoint=path, dtype=dtype, num_blocks=64))
        request = driver.begin(a_prompt(2), SCORED)
        driver.run([request], 1)
        logprobs = request.results[0].logprobs
        assert logprobs is not None
        line = torch.empty(VOCAB_SIZE)
        line[list(logprobs.top_ids)] = torch.tensor(logprobs.top_logprobs)
        found.append(line)
    exact, rounded = found
    assert (exact - rounded).abs().mean() < 0.1
    assert 0 < (exact - rounded).abs().max() < 0.5


def test_g01_a_tied_model_may_ship_its_head(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    checkpoint = open_checkpoint(path)
    tensors = dict(checkpoint.tensors())
    tensors["lm_head.weight"] = torch.zeros(VOCAB_SIZE, 64)
    model = load_model(checkpoint.config, tensors.items(), "fp32")
    assert model.logits(torch.ones(1, 64)).abs().max() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "model.norm.weight"),
        ({"model.extra.weight": torch.zeros(2)}, "model.extra.weight"),
        ({"model.norm.weight": torch.zeros(63)}, r"model.norm.weight.*\(63,\).*\(64,\)"),
    ],
)
def test_g03_wrong_tensors_are_named(tmp_path: Path, change: dict[str, Any], message: str):
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, "llama"))
    tensors = dict(checkpoint.tensors()) | change
    kept = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    with pytest.raises(WeightsError, match=message):
        load_model(checkpoint.config, kept, "fp32")


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["GemmaForCausalLM"]},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
        {"partial_rotary_factor": 0.5},
        {"quantization_config": {"quant_method": "awq"}},
        {"attention_sinks": True},
        {"final_logit_softcapping": 30.0},
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"num_hidden_layers": None},
        {"num_local_experts": 8},
    ],
    ids=lambda change: next(iter(change)),
)
def test_settings_we_do_not_compute_are_refused_by_name(tmp_path: Path, change: dict[str, Any]):
    config = open_checkpoint(tiny_checkpoint(tmp_path, "llama")).config | change
    with pytest.raises(ConfigError, match=next(iter(change))):
        load_model(config, [], "fp32")


def test_windows_need_a_size(tmp_path: Path):
    config = open_checkpoint(tiny_checkpoint(tmp_path, "mistral")).config
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None}
    with pytest.raises(ConfigError, match="sliding_window"):
        load_model(config, [], "fp32")


def test_rope_settings_are_read_in_both_dialects():
    old = read_rope({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}})
    new = read_rope({"rope_parameters": LINEAR | {"rope_theta": 5e5}})
    assert old == new
    assert math.isclose(old.theta, 5e5)
    with pytest.raises(ConfigError, match="layer type"):
        read_rope({"rope_parameters": {"full_attention": LINEAR}})


def test_older_configs_place_windows_by_a_layer_number():
    config = {"num_hidden_layers": 4, "sliding_window": 8, "max_window_layers": 3}
    assert upper_windows(config | {"use_sliding_window": True}) == (None, None, None, 8)
    assert upper_windows(config | {"use_sliding_window": False}) == (None,) * 4
    with pytest.raises(ConfigError, match="max_window_layers"):
        upper_windows({"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8})

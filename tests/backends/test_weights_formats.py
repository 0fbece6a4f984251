"""open_checkpoint on Hugging Face folders: same tensors as transformers, one dialect of config."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp.backends.weights.formats import check_names, complete_config, open_checkpoint
from rtp.core.errors import WeightsError
from tests.support.checkpoints import FAMILIES, tiny_checkpoint


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_names_and_tensors_are_those_transformers_loads(tmp_path: Path, family: str):
    import transformers

    folder = tiny_checkpoint(tmp_path, family, shards=2)
    checkpoint = open_checkpoint(folder)
    tensors = dict(checkpoint.tensors())
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    check_names(reference, tensors)
    assert list(tensors) == checkpoint.names()
    assert all(torch.equal(tensors[name], reference[name]) for name in reference)
    assert checkpoint.config["model_type"] == family
    assert checkpoint.config["rope_theta"] == 10000.0
    assert checkpoint.config["head_dim"] == 16


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            {"rope_theta": 5e5, "rope_scaling": None},
            {"rope_theta": 5e5, "rope_scaling": None},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            {"rope_theta": 1e6, "rope_scaling": None},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ),
        (
            {},
            {"rope_theta": 10000.0, "rope_scaling": None},
        ),
    ],
)
def test_rope_is_said_in_one_way(written: dict[str, Any], expected: dict[str, Any]):
    base = {"hidden_size": 64, "num_attention_heads": 4}
    completed = complete_config(base | written)
    filled = {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": False}
    assert completed == base | filled | expected


def test_what_a_config_says_is_not_overwritten():
    said = {"num_attention_heads": 4, "hidden_size": 64, "num_key_value_heads": 1, "head_dim": 32}
    said |= {"tie_word_embeddings": True, "rope_theta": 7.0, "rope_scaling": None}
    assert complete_config(said) == said


def test_rope_per_kind_of_layer_is_left_to_the_model():
    rope = {"sliding": {"rope_theta": 1e4}, "full": {"rope_theta": 1e6}}
    base = {"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": rope}
    assert complete_config(base)["rope_parameters"] == rope


def test_revision_names_bytes_and_config_not_the_folder(tmp_path: Path):
    folder = tiny_checkpoint(tmp_path / "a", "llama")
    revision = open_checkpoint(folder).revision
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    loaded = open_checkpoint(copied)
    for _ in loaded.tensors():
        pass
    assert loaded.revision == revision
    assert open_checkpoint(tiny_checkpoint(tmp_path / "b", "llama", seed=1)).revision != revision
    path = copied / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert open_checkpoint(copied).revision != revision
    other = tiny_checkpoint(tmp_path / "c", "llama", rope_theta=5e5)
    assert open_checkpoint(other).revision != revision


def test_the_same_arguments_write_the_same_checkpoint(tmp_path: Path):
    first, second = (tiny_checkpoint(tmp_path / part, "qwen2", seed=3) for part in "ab")
    assert open_checkpoint(first).revision == open_checkpoint(second).revision
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()


def test_progress_reaches_the_number_of_bytes_announced(tmp_path: Path):
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, "llama"))
    seen: list[tuple[int, int]] = []
    total = sum(
        tensor.numel() * tensor.element_size()
        for _, tensor in checkpoint.tensors(lambda done, of: seen.append((done, of)))
    )
    assert seen[-1] == (total, total) == (checkpoint.num_bytes, checkpoint.num_bytes)
    assert seen == sorted(seen)


def test_check_names_reports_both_lists():
    check_names(["a", "b"], ["b", "a"])
    with pytest.raises(WeightsError, match=r"missing: \['a'\]; .*not expected: \['c', 'd'\]"):
        check_names(["a", "b"], ["d", "b", "c"])


@pytest.mark.parametrize("name", ["nothing-here", "file.bin"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, name: str):
    (tmp_path / "file.bin").write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match=name):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("config", [None, "[]", "{", "{}x"])
def test_a_folder_needs_a_config(tmp_path: Path, config: str | None):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(WeightsError, match=r"config\.json") as error:
        open_checkpoint(tmp_path)
    if config is None:
        assert str(error.value) == f"no config.json in {tmp_path}: not a model directory"

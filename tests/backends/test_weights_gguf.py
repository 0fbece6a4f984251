"""GGUF files: written by the gguf library from a folder, read back as the same checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp.backends.weights.formats import Checkpoint, open_checkpoint
from rtp.backends.weights.gguf_header import read_gguf_header
from rtp.core.errors import WeightsError
from tests.backends.test_weights_reader import bytes_read
from tests.support.checkpoints import smollm2_path, tiny_checkpoint

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


def write_gguf(
    path: Path,
    source: Checkpoint,
    quantisation: gguf.GGMLQuantizationType = F32,
    **metadata: Any,
) -> dict[str, torch.Tensor]:
    """Writes what llama.cpp's converter would; returns the tensors a reader should give.

    Names come from the gguf library's own table. metadata adds or replaces architecture keys.
    """
    config = source.config
    family = config["model_type"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, family)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    for key, value in (keys | metadata).items():
        kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds[type(value)](key if key.startswith("general.") else f"{family}.{key}", value)
    expected = {}
    for name, tensor in source.tensors():
        data = tensor.numpy()
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        kind = quantisation if data.ndim > 1 else F32
        packed = quantize(np.ascontiguousarray(data), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), packed, raw_dtype=kind)
        stored = quantize(np.ascontiguousarray(tensor.numpy()), kind)
        expected[name] = torch.from_numpy(dequantize(stored, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, open_checkpoint(tiny_checkpoint(path.parent, "llama")))
    return path


@pytest.mark.parametrize("quantisation", [F32, Q8_0])
@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_holds_the_folder_it_was_made_from(
    tmp_path: Path, family: str, quantisation: gguf.GGMLQuantizationType, tied: bool
):
    """Names, q and k rows in Hugging Face order, config; quantised rows move with their scales."""
    folder = tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied, rms_norm_eps=1e-5)
    source = open_checkpoint(folder)
    expected = write_gguf(tmp_path / "tiny.gguf", source, quantisation)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    tensors = dict(checkpoint.tensors())
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == torch.float32
        assert torch.equal(tensors[name], tensor), name
    said = checkpoint.config.keys() & source.config.keys() - {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "attention_bias",
    }
    assert {key: checkpoint.config[key] for key in said} == {
        key: source.config[key] for key in said
    }
    assert {"hidden_size", "rope_theta", "head_dim", "vocab_size", "architectures"} <= said
    assert checkpoint.config["attention_bias"] == (family == "qwen2")


def test_revision_covers_the_bytes_and_comes_free_with_a_load(llama: Path, tmp_path: Path):
    checkpoint = open_checkpoint(llama)
    for _ in checkpoint.tensors():
        pass
    assert checkpoint.revision == open_checkpoint(llama).revision
    changed = tmp_path / "changed.gguf"
    data = bytearray(llama.read_bytes())
    data[-40] ^= 1
    changed.write_bytes(data)
    assert open_checkpoint(changed).revision != checkpoint.revision


def test_g07_truncated_file_names_file_tensor_and_sizes(llama: Path, tmp_path: Path):
    cut = tmp_path / "cut.gguf"
    data = llama.read_bytes()
    cut.write_bytes(data[:-1024])
    with pytest.raises(WeightsError, match=r"cut\.gguf: truncated: tensor .* ends at byte"):
        open_checkpoint(cut)
    cut.write_bytes(data[:300])
    with pytest.raises(WeightsError, match=r"cut\.gguf: truncated in its header.* file has 300"):
        open_checkpoint(cut)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "gemma3"}, "architecture gemma3, known are llama"),
        ({"rope.scaling.type": "yarn"}, "rope scaling yarn"),
        ({"rope.dimension_count": 8}, "part of a head"),
        ({"block_count": 0}, "llama.block_count is 0"),
        ({"feed_forward_length": "wide"}, "feed_forward_length is wide"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    llama: Path, tmp_path: Path, metadata: dict[str, Any], said: str
):
    header = read_gguf_header(llama)
    keys = {k if k.startswith("general.") else f"llama.{k}": v for k, v in metadata.items()}
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (header.metadata | keys).items():
        if key == "general.architecture":
            writer.kv_data[0].pop(key, None)
        kinds[type(value)](key, value)
    for tensor in header.tensors:
        writer.add_tensor(tensor.name, np.zeros(tensor.shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=said):
        open_checkpoint(path)


def test_linear_rope_scaling_is_said_as_in_a_config_json(tmp_path: Path):
    source = open_checkpoint(tiny_checkpoint(tmp_path, "llama"))
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "scaled.gguf", source, **scaling)
    config = open_checkpoint(tmp_path / "scaled.gguf").config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_an_unknown_tensor_is_refused_by_name(llama: Path, tmp_path: Path):
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(llama.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(
        WeightsError, match=r"odd\.gguf: tensor blk\.1\.ffn_xx\.weight is not known"
    ):
        open_checkpoint(odd)


def test_a_tensor_named_twice_is_refused(llama: Path, tmp_path: Path):
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(llama.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    with pytest.raises(WeightsError, match=r"blk\.0\.ffn_up\.weight is named twice"):
        open_checkpoint(odd)


@pytest.mark.parametrize("start", [b"GGML", b"GGUF\x00\x00\x00\x03", b"GGUF\x01\x00\x00\x00", b""])
def test_other_files_and_versions_are_refused(tmp_path: Path, start: bytes):
    path = tmp_path / "other.gguf"
    path.write_bytes(start + bytes(64 if start else 0))
    with pytest.raises(WeightsError, match=r"other\.gguf"):
        open_checkpoint(path)


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 3000), byte=st.integers(0, 255))
def test_a_damaged_header_is_refused_or_stays_inside_the_file(llama: Path, at: int, byte: int):
    """G09 too: no length a header claims is believed before the file is seen to have it."""
    path = llama.parent / "damaged.gguf"
    data = bytearray(llama.read_bytes())
    data[at] = byte
    path.write_bytes(data)
    try:
        checkpoint = open_checkpoint(path)
    except WeightsError:
        return
    assert checkpoint.names()
    assert checkpoint.num_bytes < len(data)


def test_g09_absurd_lengths_are_refused_at_once(tmp_path: Path):
    path = tmp_path / "absurd.gguf"
    key = (1).to_bytes(8, "little") + b"k"
    counts = (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    array = (9).to_bytes(4, "little") + (4).to_bytes(4, "little") + (1 << 62).to_bytes(8, "little")
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + counts + key + array + bytes(1000))
    with pytest.raises(WeightsError, match=r"absurd\.gguf: header reaches to byte"):
        open_checkpoint(path)


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="no /proc/self/io here")
def test_g13_a_real_file_is_read_once_in_order_with_its_header():
    path = smollm2_path()
    before = bytes_read()
    checkpoint = open_checkpoint(path)
    assert checkpoint.revision
    assert path.stat().st_size <= bytes_read() - before < path.stat().st_size + 2048
    assert len(checkpoint.names()) == 272


@pytest.mark.slow
def test_smollm2_in_transformers_names_paris():
    import jinja2
    import transformers
    from tokenizers import Tokenizer

    checkpoint = open_checkpoint(smollm2_path())
    files = checkpoint.tokenizer
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config))
    result = model.load_state_dict(dict(checkpoint.tensors()), strict=False)
    assert result.missing_keys == ["lm_head.weight"]
    assert not result.unexpected_keys
    model.tie_weights()
    assert files.chat_template is not None
    prompt = jinja2.Template(files.chat_template).render(
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
    )
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
    output = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
    assert tokenizer.decode(output) == "The capital of France is Paris."
    assert output[-1] in files.eos_ids

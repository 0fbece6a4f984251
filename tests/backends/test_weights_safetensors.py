"""Checkpoint loading, cases G: what is wrong in a safetensors folder stops the start by name."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rtp.backends.weights.formats import open_checkpoint
from rtp.backends.weights.safetensors_folder import INDEX, SINGLE, open_folder, read_header
from rtp.core.errors import WeightsError
from tests.support.checkpoints import tiny_checkpoint, write_shards


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards with an index; tests change a copy."""
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", shards=2)


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def raw_file(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def f32(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit_index(folder: Path, **changes: str | None) -> None:
    """Changes entries of the weight map; None takes one out."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    (folder / INDEX).write_text(json.dumps(index))


def test_g01_tied_model_that_ships_lm_head_too_loads(tmp_path: Path):
    plain = tiny_checkpoint(tmp_path / "plain", "llama", tie_word_embeddings=True)
    both = Path(shutil.copytree(plain, tmp_path / "both"))
    tensors = dict(open_checkpoint(plain).tensors())
    head = {"lm_head.weight": torch.zeros_like(tensors["model.embed_tokens.weight"])}
    write_shards(both, head | tensors, shards=1)
    loaded = dict(open_checkpoint(both).tensors())
    assert loaded.keys() == tensors.keys() == set(open_checkpoint(both).names())
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("quantised", [False, True])
def test_g03_index_that_names_a_missing_shard_is_an_error_listing_it(
    tmp_path: Path, quantised: bool
):
    tensors: dict[str, torch.Tensor] = {"a.weight": torch.ones(8, 4), "b.weight": torch.ones(8, 4)}
    if quantised:
        scales = {f"{name}_scale": torch.ones(1) for name in tensors}
        tensors = {name: t.to(torch.float8_e4m3fn) for name, t in tensors.items()} | scales
    write_shards(tmp_path, tensors, shards=2)
    assert len(open_folder(tmp_path)) == 2
    gone = shards_of(tmp_path)[1]
    gone.unlink()
    with pytest.raises(WeightsError, match=gone.name):
        open_folder(tmp_path)


def test_g05_stray_files_are_not_read(folder: Path):
    before = open_checkpoint(folder).revision
    save_file({"model.norm.weight": torch.full((64,), 9.0)}, folder / "stray.safetensors")
    save_file({"model.norm.weight": torch.full((64,), 9.0)}, folder / SINGLE)
    (folder / "broken.safetensors").write_bytes(b"no header")
    assert open_checkpoint(folder).revision == before


def test_g07_truncated_shard_names_file_and_both_sizes(folder: Path):
    shard = shards_of(folder)[1]
    size = shard.stat().st_size
    os.truncate(shard, size - 1024)
    with pytest.raises(WeightsError, match=f"{shard.name}.*expected {size}.* has {size - 1024}"):
        open_checkpoint(folder)


def test_g07_file_that_shrinks_after_its_header_was_read(folder: Path):
    checkpoint = open_checkpoint(folder)
    shard = shards_of(folder)[0]
    os.truncate(shard, shard.stat().st_size - 1024)
    with pytest.raises(WeightsError, match=shard.name):
        list(checkpoint.tensors())


@pytest.mark.parametrize("shards", [1, 2])
def test_g08_bytes_after_the_last_tensor_are_refused_single_or_sharded(tmp_path: Path, shards: int):
    write_shards(tmp_path, {"a": torch.ones(4), "b": torch.ones(4)}, shards)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes() + bytes(16))
    with pytest.raises(WeightsError, match="bytes after its last tensor: expected"):
        open_folder(tmp_path)


def test_g09_absurd_header_lengths_are_refused_without_allocating(tmp_path: Path):
    absurd = tmp_path / "absurd.safetensors"
    absurd.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    large = tmp_path / "large.safetensors"
    large.write_bytes((101_000_000).to_bytes(8, "little"))
    os.truncate(large, 102_000_000)  # sparse: no disk is used
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in (absurd, large):
        with pytest.raises(WeightsError, match=path.name):
            read_header(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_g10_file_with_metadata_only_is_an_empty_file(tmp_path: Path):
    path = raw_file(tmp_path / SINGLE, {"__metadata__": {"format": "pt"}})
    assert read_header(path).tensors == ()
    assert open_folder(tmp_path)[0].path == path


def test_g11_zero_size_and_scalar_tensors_load(folder: Path):
    odd = {
        "empty": torch.zeros(0, 128, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "flag": torch.tensor([True, False, True]),
        "counts": torch.arange(5, dtype=torch.int64),
        "small": torch.tensor([[1.5, -2.0]], dtype=torch.float8_e4m3fn),
        "last": torch.zeros(3, 0),
    }
    (folder / INDEX).unlink()
    save_file(odd, folder / SINGLE)
    loaded = dict(open_checkpoint(folder).tensors())
    assert loaded.keys() == odd.keys()
    for name, tensor in odd.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].tolist() == tensor.tolist()


@pytest.mark.parametrize("how", ["../../x.safetensors", "absolute", "link", "a/../../x", "nul\0"])
def test_g12_names_that_leave_the_folder_are_refused(folder: Path, tmp_path: Path, how: str):
    outside = tmp_path / "outside.safetensors"
    save_file({"model.norm.weight": torch.ones(64)}, outside)
    name = str(outside) if how == "absolute" else how
    if how == "link":
        name = "linked.safetensors"
        (folder / name).symlink_to(outside)
    edit_index(folder, **{"model.norm.weight": name})
    with pytest.raises(WeightsError, match="outside the folder"):
        open_checkpoint(folder)


def test_g12_single_file_that_is_a_link_out_is_refused_and_a_hub_cache_is_read(tmp_path: Path):
    hub = tmp_path / "models--org--name"
    (hub / "blobs").mkdir(parents=True)
    save_file({"a": torch.ones(4)}, hub / "blobs" / "0123")
    snapshot = hub / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / SINGLE).symlink_to("../../blobs/0123")
    assert [tensor.name for tensor in open_folder(snapshot)[0].tensors] == ["a"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / SINGLE).symlink_to(hub / "blobs" / "0123")
    with pytest.raises(WeightsError, match="outside the folder"):
        open_folder(elsewhere)


def test_index_and_shards_must_agree_on_every_tensor(folder: Path):
    first, second = shards_of(folder)
    held = read_header(first).tensors[0].name
    edit_index(folder, **{held: second.name})
    with pytest.raises(WeightsError, match=f"{first.name}: holds tensors .*{held}"):
        open_checkpoint(folder)
    edit_index(folder, **{held: first.name, "model.extra.weight": second.name})
    with pytest.raises(WeightsError, match=rf"{second.name}.*missing: \['model.extra.weight'\]"):
        open_checkpoint(folder)


@pytest.mark.parametrize("index", [b"{", b"[]", b'{"weight_map": {}}', b'{"weight_map": []}'])
def test_an_index_that_says_nothing_is_an_error(folder: Path, index: bytes):
    (folder / INDEX).write_bytes(index)
    with pytest.raises(WeightsError, match="weight_map"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "names a twice"),
        ({"a": f32(0, 8), "b": f32(4, 12)}, "tensor b overlaps"),
        ({"a": f32(0, 4), "b": f32(8, 12)}, "tensor b leaves a gap"),
        ({"a": f32(4, 12)}, "tensor a leaves a gap"),
        ({"a": f32(0, 16)}, "truncated: expected"),
        ({"a": f32(0, 12) | {"shape": [4]}}, "tensor a is F32.*16 bytes.*12"),
        ({"a": f32(0, 12) | {"shape": [-3]}}, "tensor a: "),
        ({"a": f32(0, 12) | {"shape": "3"}}, "tensor a: "),
        ({"a": f32(0, 12) | {"data_offsets": [0]}}, "tensor a: "),
        ({"a": f32(0, 12) | {"dtype": "F4"}}, "tensor a has dtype F4"),
        ({"a": {"dtype": "F32"}}, "tensor a: "),
        ({"a": None}, "tensor a: "),
    ],
)
def test_broken_headers_name_file_and_tensor(tmp_path: Path, header: Any, said: str):
    path = raw_file(tmp_path / "broken.safetensors", header, bytes(12))
    with pytest.raises(WeightsError, match=f"broken.safetensors.*{said}"):
        read_header(path)


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 40))
def test_a_damaged_header_is_refused_or_stays_inside_the_file(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: int
):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    raw_file(
        path, {"a": f32(0, 8), "b": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [8, 12]}}
    )
    content = bytearray(path.read_bytes() + bytes(12))
    content[at % len(content)] = byte
    path.write_bytes(content[: len(content) - cut])
    try:
        file = read_header(path)
    except WeightsError:
        return
    assert all(t.offset + t.num_bytes <= path.stat().st_size for t in file.tensors)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(WeightsError, match=r"pickle.*convert them to safetensors"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights_says_what_it_found(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "consolidated.safetensors").touch()
    with pytest.raises(WeightsError, match=r"neither .*consolidated\.safetensors"):
        open_checkpoint(tmp_path)

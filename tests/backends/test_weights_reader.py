"""The reader: file order, each byte once, bounded read-ahead, whatever the chunk size."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp.backends.weights import reader
from rtp.backends.weights.formats import open_checkpoint
from rtp.backends.weights.reader import ByteArray, StoredTensor, WeightFile, read_in_order
from rtp.core.errors import WeightsError
from tests.support.checkpoints import tiny_checkpoint


def stored(name: str, offset: int, num_bytes: int) -> StoredTensor:
    def build(data: ByteArray) -> torch.Tensor:
        return torch.from_numpy(data)

    return StoredTensor(name, "U8", offset, num_bytes, build)


def content(size: int) -> bytes:
    return np.random.default_rng(0).bytes(size)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=12),
    head=st.integers(0, 80),
    chunk_bytes=st.integers(1, 70),
    depth=st.integers(1, 4),
)
def test_every_tensor_gets_its_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[int, int]],
    head: int,
    chunk_bytes: int,
    depth: int,
):
    """Gaps, empty tensors, tensors across chunks, tensors partly or wholly in the head."""
    path = tmp_path_factory.getbasetemp() / "reader.bin"
    tensors, at = [], 10
    for gap, size in sizes:
        tensors.append(stored(f"t{len(tensors)}", at + gap, size))
        at += gap + size
    data = content(max(at, 10 + head))
    path.write_bytes(data)
    file = WeightFile(path, tuple(tensors), 10 + head, data[10 : 10 + head])
    read = [(t.name, d.tobytes()) for t, d in read_in_order(file, chunk_bytes, depth)]
    assert read == [(t.name, data[t.offset : t.offset + t.num_bytes]) for t in tensors]


@pytest.mark.parametrize("depth", [1, 3])
def test_g13_reads_are_sequential_in_file_order_and_each_byte_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
):
    """Issued in order: a read may overtake in the trace only those in flight beside it."""
    trace: list[tuple[int, int]] = []
    preadv = os.preadv

    def traced(fd: int, buffers: list[memoryview], offset: int) -> int:
        trace.append((offset, len(buffers[0])))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(reader.os, "preadv", traced)
    path = tmp_path / "weights.bin"
    path.write_bytes(content(100_000))
    tensors = tuple(stored(f"t{i}", 500 + i * 3_000, 3_000) for i in range(33))
    for tensor, data in read_in_order(WeightFile(path, tensors, 500), 4096, depth):
        assert data.tobytes() == content(100_000)[tensor.offset :][: tensor.num_bytes]
        assert len(trace) * 4096 <= tensor.offset + tensor.num_bytes - 500 + (depth + 1) * 4096
    in_order = sorted(trace)
    assert [offset for offset, _ in in_order] == list(range(500, 99_500, 4096))
    assert all(size == 4096 for _, size in in_order[:-1])
    assert sum(size for _, size in trace) == 99_000
    assert all(abs(trace.index(read) - i) < depth for i, read in enumerate(in_order))


def bytes_read() -> int:
    """What all threads of this process have asked of read calls so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="no /proc/self/io here")
def test_g13_a_whole_load_reads_as_many_bytes_as_the_files_have(tmp_path: Path):
    folder = tiny_checkpoint(tmp_path, "llama", shards=3, hidden_size=512, vocab_size=2048)
    files = [*folder.glob("*.safetensors"), folder / "config.json", *folder.glob("*.index.json")]
    size = sum(path.stat().st_size for path in files)
    before = bytes_read()
    checkpoint = open_checkpoint(folder)
    for _ in checkpoint.tensors():
        pass
    assert checkpoint.revision
    assert size <= bytes_read() - before < size + 2048


def test_closing_early_frees_the_file(tmp_path: Path):
    path = tmp_path / "weights.bin"
    path.write_bytes(content(10_000))
    tensors = tuple(stored(f"t{i}", i * 100, 100) for i in range(100))
    before = set(os.listdir("/proc/self/fd"))
    reading = read_in_order(WeightFile(path, tensors, 0), 256, 2)
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_that_ends_early_is_an_error_with_its_name(tmp_path: Path):
    path = tmp_path / "short.bin"
    path.write_bytes(content(1000))
    file = WeightFile(path, (stored("a", 0, 2000),), 0)
    with pytest.raises(WeightsError, match=r"short\.bin: ended at byte 1000"):
        list(read_in_order(file, 300, 2))

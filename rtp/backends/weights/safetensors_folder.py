"""Safetensors folders: the headers, and the index that says which tensor lies in which file.

Layout of a file: 8 bytes little-endian header length, a JSON header naming each tensor's dtype,
shape and byte range within the data, then the data, which the ranges cover exactly.
Source: the safetensors format description, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from rtp.backends.weights.reader import ByteArray, StoredTensor, WeightFile
from rtp.core.errors import WeightsError

MAX_HEADER_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """What a header says about one tensor; the offsets count from the start of the data."""

    dtype: str
    shape: list[_Count]
    data_offsets: tuple[_Count, _Count]


def open_folder(directory: Path) -> tuple[WeightFile, ...]:
    """The weight files of a Hugging Face directory, by name, headers read and checked.

    With an index, only the files it names are opened, and each must lie inside the folder and hold
    exactly the tensors the index places there. Raises WeightsError naming file and tensor.
    """
    if (directory / INDEX).exists():
        return _open_indexed(directory)
    if (directory / SINGLE).exists():
        return (read_header(_inside(directory, SINGLE)),)
    found = sorted(path.name for path in directory.iterdir())
    if any(name.endswith((".bin", ".pt", ".pth")) for name in found):
        raise WeightsError(
            f"{directory}: the weights are pickled ({', '.join(found)}); loading a pickle can run"
            " any code, so it is refused: convert them to safetensors"
        )
    raise WeightsError(f"{directory}: neither {SINGLE} nor {INDEX}; found {', '.join(found)}")


def read_header(path: Path) -> WeightFile:
    """Reads and checks the header of one file. Costs two small reads, whatever the file's size."""
    with open(path, "rb", buffering=0) as file:
        file_size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        header_size = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_size > file_size - 8:
            raise WeightsError(
                f"{path}: truncated: header wants {8 + header_size} bytes, file has {file_size}"
            )
        if header_size > MAX_HEADER_BYTES:
            raise WeightsError(
                f"{path}: header of {header_size} bytes, at most {MAX_HEADER_BYTES} are accepted"
            )
        raw = file.read(header_size)
    if len(raw) < header_size:
        raise WeightsError(f"{path}: truncated while its header was read")
    start = 8 + header_size
    tensors = [
        _stored_tensor(path, start, name, entry) for name, entry in _parse(path, raw).items()
    ]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            relation = "overlaps the one before it" if tensor.offset < end else "leaves a gap"
            raise WeightsError(f"{path}: tensor {tensor.name} {relation} at byte {tensor.offset}")
        end += tensor.num_bytes
    if end != file_size:
        state = "truncated" if file_size < end else "has bytes after its last tensor"
        raise WeightsError(f"{path}: {state}: expected {end} bytes, file has {file_size}")
    return WeightFile(path, tuple(tensors), start)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    """The header's tensor entries; a name given twice is an error, not a choice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise WeightsError(f"{path}: the header names {twice} twice")
        return found

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _stored_tensor(path: Path, start: int, name: str, entry: Any) -> StoredTensor:
    try:
        checked = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise WeightsError(f"{path}: tensor {name}: {error}") from error
    dtype, shape, (begin, end) = checked.dtype, checked.shape, checked.data_offsets
    if dtype not in _DTYPES:
        raise WeightsError(f"{path}: tensor {name} has dtype {dtype}, known are {list(_DTYPES)}")
    num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - begin != num_bytes:
        raise WeightsError(
            f"{path}: tensor {name} is {dtype}{shape}, {num_bytes} bytes,"
            f" but its range has {end - begin}"
        )
    build = partial(_build, dtype=_DTYPES[dtype], shape=shape)
    return StoredTensor(name, f"{dtype}{shape}", start + begin, num_bytes, build)


def _build(data: ByteArray, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if not data.size:  # torch cannot view an empty array as another dtype
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _open_indexed(directory: Path) -> tuple[WeightFile, ...]:
    weight_map = _weight_map(directory)
    expected: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        expected.setdefault(name, set()).add(tensor)
    paths = {name: _inside(directory, name) for name in sorted(expected)}
    missing = [name for name, path in paths.items() if not path.is_file()]
    if missing:
        raise WeightsError(f"{directory}: {INDEX} names files that are missing: {missing}")
    files = []
    for name, path in paths.items():
        file = read_header(path)
        held = {tensor.name for tensor in file.tensors}
        if absent := sorted(expected[name] - held):
            raise WeightsError(f"{path}: {INDEX} places tensors here that are missing: {absent}")
        if unknown := sorted(held - expected[name]):
            raise WeightsError(f"{path}: holds tensors that {INDEX} does not place here: {unknown}")
        files.append(file)
    return tuple(files)


def _weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: no weight_map of tensor names to file names") from error
    if not names:
        raise WeightsError(f"{path}: the weight_map is empty")
    return names


def _inside(directory: Path, name: str) -> Path:
    """The file of that name, refused when the name or a link leads out of the folder.

    A hub cache keeps a snapshot as links into its own `blobs` folder, two levels up; that one
    layout is accepted, for a link that stands in the folder itself.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise WeightsError(f"{directory}: weight file {name!r} lies outside the folder")
    path = directory / name
    home, real = directory.resolve(), path.resolve()
    if real.is_relative_to(home):
        return path
    if home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs":
        return path
    raise WeightsError(f"{directory}: weight file {name!r} lies outside the folder: {real}")

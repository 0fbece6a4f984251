"""The header of a GGUF file: metadata and where each tensor lies.

The `gguf` package has a reader too. It maps the whole file into memory and makes an array object of
every string, which takes about two seconds for a vocabulary of 49152; this one reads the header
once, in large pieces, and refuses lengths the file cannot have. Source: the GGUF specification,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import io
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from rtp.core.errors import WeightsError

MAX_HEADER_BYTES = 100_000_000
PIECE_BYTES = 1 << 20

_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"} | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file, not yet read."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it (the file has it the other way round)."""
    offset: int
    """From the start of the file."""
    num_bytes: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored bytes: rows of quantised blocks."""
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // block * block_bytes)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All a GGUF file says before its data."""

    metadata: dict[str, Any]
    """Scalars, strings and lists by their full key, such as 'llama.block_count'."""
    tensors: tuple[GgufTensor, ...]
    """In file order."""
    start: int
    """File position after the last piece read; the bytes before it need not be read again."""
    head: bytes
    """The data bytes that came along with the header: file positions start - len(head) .. start."""


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads and checks the header. Raises WeightsError naming file and tensor."""
    file_size = path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        scan = _Scan(path, file)
        if scan.take(4) != b"GGUF":
            raise WeightsError(f"{path}: not a GGUF file")
        version = scan.number("I")
        if version not in (2, 3):
            raise WeightsError(f"{path}: GGUF version {version}, known are 2 and 3 (little-endian)")
        num_tensors, num_entries = scan.number("Q"), scan.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = scan.string()
            metadata[key] = scan.value(scan.number("I"))
        entries = [_tensor_entry(scan) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise WeightsError(f"{path}: general.alignment is {alignment}")
        data_at = -(-scan.position // alignment) * alignment
        head = scan.rest(data_at)
    tensors = [_tensor(path, data_at, *entry) for entry in entries]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_layout(path, tensors, data_at, file_size)
    return GgufHeader(metadata, tuple(tensors), data_at + len(head), head)


class _Scan:
    """A cursor over the header, which is read in pieces as far as it turns out to reach."""

    def __init__(self, path: Path, file: io.FileIO) -> None:
        self._path = path
        self._file = file
        self._held = bytearray()
        self.position = 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > MAX_HEADER_BYTES:
            raise WeightsError(
                f"{self._path}: header reaches to byte {end},"
                f" at most {MAX_HEADER_BYTES} are accepted"
            )
        while end > len(self._held):
            piece = self._file.read(PIECE_BYTES)
            if not piece:
                raise WeightsError(
                    f"{self._path}: truncated in its header:"
                    f" expected at least {end} bytes, file has {len(self._held)}"
                )
            self._held += piece
        data = bytes(self._held[self.position : end])
        self.position = end
        return data

    def number(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return value

    def string(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self._path}: a string in the header is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._scalars(kind, 1)[0]
        inner, count = self.number("I"), self.number("Q")
        if inner == _STRING:
            return [self.string() for _ in range(count)]
        return self._scalars(inner, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise WeightsError(f"{self._path}: unknown metadata type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return values

    def rest(self, data_at: int) -> bytes:
        """What was read beyond the header. Skips the padding before the data."""
        if data_at > len(self._held):
            self._file.seek(data_at)
        return bytes(self._held[data_at:])


def _tensor_entry(scan: _Scan) -> tuple[str, list[int], int, int]:
    name = scan.string()
    dims = [scan.number("Q") for _ in range(scan.number("I"))]
    return name, dims, scan.number("I"), scan.number("Q")


def _tensor(
    path: Path, data_at: int, name: str, dims: list[int], kind: int, offset: int
) -> GgufTensor:
    try:
        quantisation = GGMLQuantizationType(kind)
    except ValueError:
        raise WeightsError(f"{path}: tensor {name} has unknown type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[quantisation]
    if not dims or not all(dims) or dims[0] % block:
        raise WeightsError(
            f"{path}: tensor {name} of shape {dims} is not made of {quantisation.name} blocks"
        )
    num_bytes = math.prod(dims) // block * block_bytes
    return GgufTensor(name, quantisation, tuple(reversed(dims)), data_at + offset, num_bytes)


def _check_layout(path: Path, tensors: list[GgufTensor], data_at: int, file_size: int) -> None:
    end = data_at
    names = set()
    for tensor in tensors:
        if tensor.name in names:
            raise WeightsError(f"{path}: tensor {tensor.name} is named twice")
        names.add(tensor.name)
        if tensor.offset < end:
            raise WeightsError(f"{path}: tensor {tensor.name} overlaps the one before it")
        end = tensor.offset + tensor.num_bytes
        if end > file_size:
            raise WeightsError(
                f"{path}: truncated: tensor {tensor.name} ends at byte {end}, file has {file_size}"
            )

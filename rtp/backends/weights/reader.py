"""Reads weight files in file order, each byte once, ahead of whoever consumes the tensors.

On a network disk two things decide how long a load takes: how large a read is and how many are
in flight. So a file is read in chunks of a few megabytes, several at a time, issued in file order
into a small pool of buffers that are used again and again; the tensors are cut out of the chunks
while the next ones are under way. Memory above the tensors themselves is CHUNK_BYTES * DEPTH.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rtp.core.errors import WeightsError

ByteArray = npt.NDArray[np.uint8]

CHUNK_BYTES = 4 << 20
DEPTH = 4


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as it lies in a file."""

    name: str
    """The name the model knows it by (Hugging Face)."""
    label: str
    """Stored dtype and shape, as in 'BF16[49152, 576]'."""
    offset: int
    num_bytes: int
    build: Callable[[ByteArray], torch.Tensor]
    """Stored bytes -> the tensor. May keep and alias the array it is given."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file whose header has been read and checked."""

    path: Path
    tensors: tuple[StoredTensor, ...]
    """In file order; they do not overlap."""
    start: int
    """Where reading goes on: everything before it has been read already."""
    head: bytes = b""
    """Bytes just before `start` that came along with the header and belong to tensors."""


def read_in_order(
    file: WeightFile, chunk_bytes: int = CHUNK_BYTES, depth: int = DEPTH
) -> Iterator[tuple[StoredTensor, ByteArray]]:
    """Yields each tensor with its bytes, [num_bytes] uint8 owned by the caller.

    At most `depth` reads of `chunk_bytes` are in flight or waiting. Raises WeightsError when the
    file ends early. Closing the iterator waits for the reads in flight and frees the file.
    """
    end = max((tensor.offset + tensor.num_bytes for tensor in file.tensors), default=file.start)
    chunks = _read_ahead(file.path, file.start, end, chunk_bytes, depth)
    try:
        chunk_at, chunk = file.start - len(file.head), memoryview(file.head)
        for tensor in file.tensors:
            data = np.empty(tensor.num_bytes, np.uint8)
            filled = 0
            while filled < tensor.num_bytes:
                begin = tensor.offset + filled - chunk_at
                if begin >= len(chunk):
                    chunk_at, chunk = next(chunks)
                    continue
                size = min(tensor.num_bytes - filled, len(chunk) - begin)
                data[filled : filled + size] = chunk[begin : begin + size]
                filled += size
            yield tensor, data
    finally:
        chunks.close()


def _read_ahead(
    path: Path, start: int, end: int, chunk_bytes: int, depth: int
) -> Generator[tuple[int, memoryview], None, None]:
    """Yields (offset, bytes) over [start, end). A chunk is valid until the next is asked for."""
    pending: deque[tuple[int, memoryview, Future[None]]] = deque()
    offsets = iter(range(start, end, chunk_bytes))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_SEQUENTIAL)
        with ThreadPoolExecutor(depth, thread_name_prefix="weights") as pool:

            def submit(buffer: memoryview) -> None:
                offset = next(offsets, None)
                if offset is not None:
                    chunk = buffer[: min(chunk_bytes, end - offset)]
                    future = pool.submit(_fill, fd, offset, chunk, path)
                    pending.append((offset, buffer, future))

            for _ in range(depth):
                submit(memoryview(bytearray(min(chunk_bytes, end - start))))
            while pending:
                offset, buffer, future = pending.popleft()
                future.result()
                yield offset, buffer[: end - offset]
                submit(buffer)
    finally:
        os.close(fd)


def _fill(fd: int, offset: int, chunk: memoryview, path: Path) -> None:
    filled = 0
    while filled < len(chunk):
        size = os.preadv(fd, [chunk[filled:]], offset + filled)
        if size == 0:
            raise WeightsError(
                f"{path}: ended at byte {offset + filled} while being read,"
                f" expected at least {offset + len(chunk)} bytes"
            )
        filled += size

"""Request traces as files: rows read, bad rows told by their line.

Mooncake JSONL: one request a line, `timestamp` in ms, `input_length`, `output_length` in tokens,
`hash_ids`: one number per block of 512 tokens of the prompt, the last one perhaps partly filled.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rtp.core.trace import TraceRow

MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that is no request, and why. Lines count from 1."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """rows: by arrival, those of one instant in the file's order; the first arrives at 0."""

    rows: list[TraceRow]
    block_size: int
    bad: list[BadRow]
    num_blank: int


class _Mooncake(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_mooncake(path: Path, *, block_size: int = MOONCAKE_BLOCK) -> Trace:
    """Reads a whole file, gzipped if its name ends so. Whatever is wrong with a row is in `bad`,
    and the row is not; OSError is the file's own."""
    rows: list[TraceRow] = []
    bad: list[BadRow] = []
    num_blank = 0
    decoder = msgspec.json.Decoder(_Mooncake)
    for number, line in enumerate(_lines(path), 1):
        if not line:
            num_blank += 1
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            bad.append(BadRow(number, str(error)))
            continue
        reason = _fault(row, block_size)
        if reason:
            bad.append(BadRow(number, reason))
        else:
            rows.append(
                TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)
            )
    rows.sort(key=lambda row: row.arrival_s)
    first = rows[0].arrival_s if rows else 0.0
    if first:
        rows = [
            TraceRow(row.arrival_s - first, row.num_tokens, row.num_output, row.block_ids)
            for row in rows
        ]
    return Trace(rows, block_size, bad, num_blank)


def write_mooncake(path: Path, rows: Iterable[TraceRow]) -> None:
    """The same bytes for the same rows, gzipped if the name ends so."""
    lines = b"".join(msgspec.json.encode(_as_mooncake(row)) + b"\n" for row in rows)
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)


def _as_mooncake(row: TraceRow) -> dict[str, Any]:  # Any: what JSON holds
    return {
        "timestamp": round(row.arrival_s * 1000),
        "input_length": row.num_tokens,
        "output_length": row.num_output,
        "hash_ids": row.block_ids,
    }


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        for line in file:
            yield line.removeprefix(b"\xef\xbb\xbf").strip()


def _fault(row: _Mooncake, block_size: int) -> str:
    """Why this cannot be a request; "" where it can."""
    if row.timestamp < 0:
        return f"timestamp {row.timestamp:g} is negative"
    if row.input_length < 1 or row.output_length < 1:
        return f"input_length {row.input_length} and output_length {row.output_length}: at least 1"
    blocks = -(-row.input_length // block_size)
    if len(row.hash_ids) != blocks:
        return f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens, which are {blocks}"
    if min(row.hash_ids) < 0:
        return f"hash id {min(row.hash_ids)} is negative"
    return ""

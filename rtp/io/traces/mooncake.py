"""Mooncake JSONL: one request a line, `timestamp` in ms, `input_length`, `output_length` in tokens,
`hash_ids`: one number per block of 512 tokens of the prompt, the last perhaps partly filled.

Source: kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec

from rtp.core.trace import TraceRow
from rtp.io.traces.files import Head, lines
from rtp.io.traces.rows import Chains, Rows, Size, Trace, fitting

MOONCAKE_BLOCK = 512


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def fits(head: Head) -> bool:
    return {"timestamp", "input_length", "output_length", "hash_ids"} <= head.keys


def read(path: Path, *, block_size: Size = MOONCAKE_BLOCK) -> Trace:
    rows, chains = Rows(units_per_s=1000), Chains()
    decoder = msgspec.json.Decoder(_Line)

    def take(text: bytes) -> None:
        line = decoder.decode(text)
        ids = fitting(line.hash_ids, line.input_length, block_size)
        rows.add(line.timestamp, line.input_length, line.output_length, lambda: chains.of(ids))

    rows.take_all(lines(path), take)
    return rows.trace(path, "mooncake", block_size, chains.num_renamed)


def write_mooncake(path: Path, rows: Iterable[TraceRow], block_size: int = MOONCAKE_BLOCK) -> None:
    """The same bytes for the same rows, gzipped if the name ends so. Times are rounded to ms; a
    partly filled last block without a number gets one of its own."""
    rows = list(rows)
    unused = count(1 + max((max(row.block_ids, default=0) for row in rows), default=0))
    out = b"".join(msgspec.json.encode(_as_line(row, block_size, unused)) + b"\n" for row in rows)
    path.write_bytes(gzip.compress(out, mtime=0) if path.suffix == ".gz" else out)


def _as_line(
    row: TraceRow, block_size: int, unused: Iterable[int]
) -> dict[str, Any]:  # Any: what JSON holds
    missing = -(-row.num_tokens // block_size) - len(row.block_ids)
    return {
        "timestamp": round(row.arrival_s * 1000),
        "input_length": row.num_tokens,
        "output_length": row.num_output,
        "hash_ids": (*row.block_ids, *islice(unused, missing)),
    }

"""rtp's own trace files: everything that a trace says, exactly.

JSONL. The first line names the block size: `{"rtp_trace": 1, "block_size": 64}`. Then one request a
line: `arrival_s`, `num_tokens`, `num_output`, `block_ids`, and where they say something `session`,
`after`, `think_s`, `tenant` (core/trace).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from rtp.core.errors import ConfigError
from rtp.core.trace import TraceRow
from rtp.io.traces.files import Head, lines
from rtp.io.traces.rows import MOST_TOKENS, Chains, Rows, Trace, fitting

VERSION = 1


class _First(msgspec.Struct, frozen=True):
    rtp_trace: int
    block_size: int


def fits(head: Head) -> bool:
    return "rtp_trace" in head.keys


def read(path: Path) -> Trace:
    rows, chains = Rows(), Chains()
    source = lines(path)
    block_size = _block_size(path, rows.header(source))
    decoder = msgspec.json.Decoder(TraceRow)
    places: list[int] = []
    """Of each line's row among those added; -1 where the line is bad."""

    def take(text: bytes) -> None:
        places.append(-1)
        row = decoder.decode(text)
        if row.after >= len(places) - 1:
            raise ValueError(f"waits for row {row.after}, which does not come before it")
        ids = fitting(row.block_ids, row.num_tokens, block_size, whole_alone=True)
        places[-1] = rows.add(
            row.arrival_s,
            row.num_tokens,
            row.num_output,
            lambda: chains.of(ids),
            session=row.session,
            after=places[row.after] if row.after >= 0 else -1,
            think_s=row.think_s,
            tenant=row.tenant,
        )

    rows.take_all(source, take)
    return rows.trace(path, "rtp", block_size, chains.num_renamed)


def write(path: Path, rows: Iterable[TraceRow], block_size: int) -> None:
    """The same bytes for the same rows, gzipped if the name ends so."""
    out = [msgspec.json.encode(_First(VERSION, block_size))]
    out += [msgspec.json.encode(_as_line(row)) for row in rows]
    text = b"".join(line + b"\n" for line in out)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _as_line(row: TraceRow) -> dict[str, Any]:  # Any: what JSON holds
    said = {f.name: getattr(row, f.name) for f in fields(TraceRow)}
    return {f.name: said[f.name] for f in fields(TraceRow) if said[f.name] != f.default}


def _block_size(path: Path, first: bytes) -> int:
    try:
        head = msgspec.json.decode(first, type=_First)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: its first line: {error}") from None
    if head.rtp_trace != VERSION or not 1 <= head.block_size <= MOST_TOKENS:
        raise ConfigError(
            f"{path}: version {head.rtp_trace}, block size {head.block_size}: this rtp reads"
            f" version {VERSION}, blocks of 1 to {MOST_TOKENS} tokens"
        )
    return head.block_size

"""Traces for tests: the generated sample, always there, and Mooncake's, which are found through
RTP_TRACES (default ../shared/traces beside the project) or skipped."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from rtp.core.trace import TraceRow
from rtp.io import traces

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "traces" / "sample_conversation.jsonl.gz"
CONVERSATION = "mooncake_conversation_trace.jsonl.gz"
SYNTHETIC = "mooncake_synthetic_trace.jsonl.gz"


@cache
def sample() -> list[TraceRow]:
    return traces.read(SAMPLE).rows


def conversation() -> list[TraceRow]:
    """Skips the test where the trace is not there."""
    return _read(found(CONVERSATION))


def synthetic() -> list[TraceRow]:
    """Skips the test where the trace is not there."""
    return _read(found(SYNTHETIC))


def found(name: str) -> Path:
    """A file of the folder of traces. Skips the test where it is not there."""
    path = Path(os.environ.get("RTP_TRACES", ROOT.parent / "shared" / "traces")) / name
    if not path.is_file():
        pytest.skip(f"{path} is not there; RTP_TRACES names the folder of traces")
    return path


@cache
def _read(path: Path) -> list[TraceRow]:
    return traces.read(path).rows


def returning(rows: list[TraceRow]) -> list[TraceRow]:
    """Those that share more than the head of all with another: conversations of several turns."""
    openings = Counter(_opening(row) for row in rows)
    return [row for row in rows if len(row.block_ids) > 1 and openings[_opening(row)] > 1]


def only_head_shared(rows: list[TraceRow]) -> list[TraceRow]:
    """The same requests, each with blocks of its own behind the head of all."""
    fresh = iter(range(1, 1 << 40))
    return [
        TraceRow(
            row.arrival_s,
            row.num_tokens,
            row.num_output,
            (row.block_ids[0], *(next(fresh) for _ in row.block_ids[1:])),
        )
        for row in rows
    ]


def _opening(row: TraceRow) -> tuple[int, ...]:
    return row.block_ids[:2]

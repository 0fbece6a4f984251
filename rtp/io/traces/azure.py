"""Azure's LLM inference traces of 2023 and 2024: CSV with `TIMESTAMP`, `ContextTokens`,
`GeneratedTokens`, wall-clock times to 100 ns.

Those of 2024 have an offset from UTC; a time without one is taken for UTC. Nothing is known of
shared prefixes, so every prompt has blocks of its own.

Source: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024.md.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from rtp.io.traces.files import TOLD, Head, columns, lines, whole
from rtp.io.traces.rows import SMALL_BLOCK, OwnBlocks, Rows, Size, Trace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
NS = 1_000_000_000


def fits(head: Head) -> bool:
    return head.keys >= set(COLUMNS)


def read(path: Path, *, block_size: Size = SMALL_BLOCK) -> Trace:
    rows, own = Rows(units_per_s=NS), OwnBlocks(block_size)
    source = lines(path)
    cut = columns(path, rows.header(source), COLUMNS)

    def take(line: bytes) -> None:
        at, tokens, output = cut(line)
        num_tokens = whole(tokens, COLUMNS[1])
        rows.add(_ns(at), num_tokens, whole(output, COLUMNS[2]), lambda: own.of(num_tokens))

    rows.take_all(source, take)
    return rows.trace(path, "azure", block_size)


def _ns(text: str) -> int:
    """Since 1970. Raises ValueError."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"TIMESTAMP {text[:TOLD]!r} is no time")
    seconds, fraction, zone = match.groups()
    at = datetime.fromisoformat(seconds + (zone or "").replace("Z", "+00:00"))
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return int(at.timestamp()) * NS + int((fraction or "0").ljust(9, "0"))

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

from rtp.io.traces.files import Head, columns, whole
from rtp.io.traces.rows import SMALL_BLOCK, OwnBlocks, Rows, Size, Trace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
NS = 1_000_000_000


def fits(head: Head) -> bool:
    return head.keys >= set(COLUMNS)


def read(path: Path, *, block_size: Size = SMALL_BLOCK) -> Trace:
    rows, own = Rows(units_per_s=NS), OwnBlocks(block_size)

    def take(cells: list[str]) -> None:
        num_tokens = whole(cells[1], COLUMNS[1])
        rows.add(_ns(cells[0]), num_tokens, whole(cells[2], COLUMNS[2]), own.of(num_tokens))

    rows.take_all(columns(path, COLUMNS), take)
    return rows.trace(path, "azure", block_size)


def _ns(text: str) -> int:
    """Since 1970. Raises ValueError."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"TIMESTAMP {text!r} is no time")
    seconds, fraction, zone = match.groups()
    at = datetime.fromisoformat(seconds + (zone or "").replace("Z", "+00:00"))
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return int(at.timestamp()) * NS + int((fraction or "0").ljust(9, "0"))

"""BurstGPT CSV: `Timestamp` in s, `Request tokens`, `Response tokens`; newer files also
`Session ID` and `Elapsed time` of the whole request in s.

A failed request has no response tokens and is told as a bad row. Where session and elapsed time are
known, a row that came after the end of its session's last one waits for it, and its think time is
what lay between. Nothing is known of shared prefixes.

Source: HPMLL/BurstGPT, README.
"""

from __future__ import annotations

from math import inf
from pathlib import Path

from rtp.io.traces.files import Head, columns, number, whole
from rtp.io.traces.rows import SMALL_BLOCK, OwnBlocks, Rows, Size, Trace

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
OPTIONAL = ("Session ID", "Elapsed time")


def fits(head: Head) -> bool:
    return head.keys >= set(COLUMNS)


def read(path: Path, *, block_size: Size = SMALL_BLOCK) -> Trace:
    rows, own = Rows(), OwnBlocks(block_size)
    sessions: dict[str, int] = {}
    last: dict[int, tuple[int, float]] = {}
    """By session: the row added last, and when it had ended."""

    def take(cells: list[str]) -> None:
        at, num_tokens = number(cells[0], COLUMNS[0]), whole(cells[1], COLUMNS[1])
        num_output = whole(cells[2], COLUMNS[2])
        name, elapsed = cells[3:]
        ends = at + number(elapsed, OPTIONAL[1]) if elapsed else inf
        if num_output == 0:
            raise ValueError("failed when it was recorded: no response tokens")
        session = sessions.setdefault(name, len(sessions)) if name else -1
        before, ended = last.get(session, (-1, inf)) if name else (-1, inf)
        waits = ended <= at
        index = rows.add(
            at,
            num_tokens,
            num_output,
            own.of(num_tokens),
            session=session,
            after=before if waits else -1,
            think_s=at - ended if waits else 0.0,
        )
        last[session] = index, ends

    rows.take_all(columns(path, COLUMNS, OPTIONAL), take)
    return rows.trace(path, "burstgpt", block_size)

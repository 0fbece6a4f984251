"""BurstGPT CSV: `Timestamp` in s, `Request tokens`, `Response tokens`; newer files also
`Session ID` and `Elapsed time` of the whole request in s.

A failed request has no response tokens and is told as a bad row. Where session and elapsed time are
known, a row that came after the end of the one before it in its session waits for it, and its think
time is what lay between. Nothing is known of shared prefixes.

Source: HPMLL/BurstGPT, README.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from operator import attrgetter
from pathlib import Path

from rtp.io.traces.files import Head, columns, lines, number, whole
from rtp.io.traces.rows import SMALL_BLOCK, OwnBlocks, Rows, Size, Trace, duration

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
OPTIONAL = ("Session ID", "Elapsed time")


@dataclass(frozen=True, slots=True)
class _Turn:
    """A line as it stands. end_s: inf where it is not known."""

    line: int
    at: float
    end_s: float
    num_tokens: int
    num_output: int
    session: int


def fits(head: Head) -> bool:
    return head.keys >= set(COLUMNS)


def read(path: Path, *, block_size: Size = SMALL_BLOCK) -> Trace:
    rows, own = Rows(), OwnBlocks(block_size)
    source = lines(path)
    cut = columns(path, rows.header(source), COLUMNS, OPTIONAL)
    sessions: dict[str, int] = {}
    turns: list[_Turn] = []
    last: dict[int, tuple[int, float]] = {}
    """By session: the row added last, and when it had ended."""

    def parse(line: bytes) -> None:
        time, tokens, output, name, elapsed = cut(line)
        at, num_output = number(time, COLUMNS[0]), whole(output, COLUMNS[2])
        if num_output == 0:
            raise ValueError("failed when it was recorded: no response tokens")
        took_s = duration(number(elapsed, OPTIONAL[1]), OPTIONAL[1]) if elapsed else inf
        session = sessions.setdefault(name, len(sessions)) if name else -1
        num_tokens = whole(tokens, COLUMNS[1])
        turns.append(_Turn(rows.line, at, at + took_s, num_tokens, num_output, session))

    def add(turn: _Turn) -> None:
        before, ended = last.get(turn.session, (-1, inf))
        waits = ended <= turn.at
        index = rows.add(
            turn.at,
            turn.num_tokens,
            turn.num_output,
            lambda: own.of(turn.num_tokens),
            session=turn.session,
            after=before if waits else -1,
            think_s=turn.at - ended if waits else 0.0,
        )
        if turn.session >= 0:
            last[turn.session] = index, turn.end_s

    rows.take_all(source, parse)
    turns.sort(key=attrgetter("at"))
    rows.take_all(((turn.line, turn) for turn in turns), add)
    return rows.trace(path, "burstgpt", block_size)

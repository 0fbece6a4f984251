"""Qwen-Bailian JSONL: one request a line, `timestamp` in s, `hash_ids` of 16 tokens each.

`chat_id` names a request, `parent_chat_id` the one whose conversation it continues (-1: none). A
number names the content of its block alone, so the same text behind another prefix has the same
number: such blocks are renamed. Whether a partly filled last block has a number is not said; both
ways are taken.

Source: alibaba-edu/qwen-bailian-usagetraces-anon, README.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import msgspec

from rtp.io.traces.files import Head, lines
from rtp.io.traces.rows import Chains, Rows, Trace, fitting

BLOCK = 16
NONE = -1


class _Line(msgspec.Struct, frozen=True):
    chat_id: int
    parent_chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def fits(head: Head) -> bool:
    return {"chat_id", "parent_chat_id", "hash_ids"} <= head.keys


def read(path: Path) -> Trace:
    """Rows of one conversation have its session; how long an answer took is not said, so none of
    them waits for another."""
    rows, chains = Rows(), Chains()
    decoder = msgspec.json.Decoder(_Line)
    session_of: dict[int, int] = {}
    fresh = count()

    def take(text: bytes) -> None:
        line = decoder.decode(text)
        parent = line.parent_chat_id
        session = session_of.get(parent) if parent != NONE else None
        if session is None:
            session = next(fresh)
        session_of[line.chat_id] = session
        ids = fitting(line.hash_ids, line.input_length, BLOCK, whole_alone=True)
        rows.add(
            line.timestamp,
            line.input_length,
            line.output_length,
            lambda: chains.of(ids),
            session=session,
        )

    rows.take_all(lines(path), take)
    return rows.trace(path, "bailian", BLOCK, chains.num_renamed)

"""The load of the benchmarks: a trace of conversations, cut into segments and looped."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

from bench.conversation import BLOCK, Conversation
from rtp.core.types import HASH_BYTES

ROWS = [
    (0, 3 * BLOCK + 5, [0, 1, 2, 3]),
    (0, 2 * BLOCK, [0, 9]),
    (3000, 5 * BLOCK, [0, 1, 2, 4, 5]),  # goes on with the first, whose last block was not whole
    (3000, 100, [11]),
    (6000, 4 * BLOCK + 1, [0, 9, 12, 13, 14]),  # goes on with the second
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for timestamp, length, ids in ROWS:
            row = {"timestamp": timestamp, "input_length": length, "output_length": 7}
            file.write(json.dumps(row | {"hash_ids": ids}) + "\n")
    return path


def whole(path: list[int], length: int) -> list[int]:
    return path[: length // BLOCK]


def test_requests_share_hashes_exactly_as_far_as_they_share_whole_blocks(trace: Path):
    arrivals = list(islice(Conversation(trace).arrivals(10.0), len(ROWS)))
    for one, (_, length, ids) in zip(arrivals, ROWS, strict=True):
        hashes = b"".join(one.parts)
        assert len(hashes) == HASH_BYTES * (length // BLOCK)
        for other, (_, other_length, other_ids) in zip(arrivals, ROWS, strict=True):
            same = 0
            for mine, theirs in zip(
                whole(ids, length), whole(other_ids, other_length), strict=False
            ):
                same += mine == theirs
            shared = b"".join(other.parts)[: same * HASH_BYTES]
            assert hashes.startswith(shared)
            segments = [a == b for a, b in zip(one.keys, other.keys, strict=False)]
            tokens = sum(
                len(part) for part, equal in zip(one.parts, segments, strict=False) if equal
            )
            assert tokens == same * HASH_BYTES, "segments end where paths part"


def test_a_loop_shares_nothing_with_the_one_before(trace: Path):
    arrivals = list(islice(Conversation(trace).arrivals(10.0), 2 * len(ROWS)))
    first, second = arrivals[: len(ROWS)], arrivals[len(ROWS) :]
    assert not {k for a in first for k in a.keys} & {k for a in second for k in a.keys}
    assert not {p for a in first for p in a.parts} & {p for a in second for p in a.parts}
    assert {a.chat for a in first}.isdisjoint(a.chat for a in second)


def test_arrivals_come_in_order_at_the_rate_asked_for(trace: Path):
    arrivals = list(islice(Conversation(trace).arrivals(10.0), 10 * len(ROWS)))
    times = [arrival.at for arrival in arrivals]
    assert times == sorted(times)
    assert times[0] >= 0
    assert 9 * len(ROWS) / 10 <= times[-1] <= len(ROWS)
    assert [arrival.number for arrival in arrivals] == list(range(len(times)))


def test_turns_of_a_conversation_carry_one_chat(trace: Path):
    chats = [arrival.chat for arrival in islice(Conversation(trace).arrivals(10.0), len(ROWS))]
    assert chats[2] == chats[0]
    assert chats[4] == chats[1]
    assert len(set(chats)) == 3

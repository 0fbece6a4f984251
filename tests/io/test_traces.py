"""Trace files: what is read, and that nothing is dropped without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtp.core.trace import TraceRow, hashes_of
from rtp.core.types import split_hashes
from rtp.io.traces import read, write_mooncake
from tests.support.traces import conversation, sample

ROW = '{"timestamp": %d, "input_length": 600, "output_length": 8, "hash_ids": [0, %d]}'


def a_file(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_bytes(b"\n".join(line.encode() for line in lines) + b"\n")
    return path


def test_t01_times_count_from_the_first_row(tmp_path: Path):
    path = a_file(tmp_path, ROW % (1_700_000_000_000, 1), ROW % (1_700_000_003_500, 2))
    assert [row.arrival_s for row in read(path).rows] == [0.0, 3.5]


def test_rows_of_one_instant_stay_in_the_order_of_the_file(tmp_path: Path):
    path = a_file(tmp_path, ROW % (9, 1), ROW % (3, 2), ROW % (9, 3), ROW % (3, 4))
    assert [row.block_ids[1] for row in read(path).rows] == [2, 4, 1, 3]


def test_t04_hash_ids_that_do_not_fit_the_length_are_told_with_their_line(tmp_path: Path):
    wrong = '{"timestamp":0,"input_length":20,"output_length":8,"hash_ids":[0,1]}'
    trace = read(a_file(tmp_path, ROW % (0, 1), wrong))
    assert len(trace.rows) == 1
    assert [(bad.line, bad.reason) for bad in trace.bad] == [
        (2, "2 block ids for 20 tokens, which are 1")
    ]


def test_t11_a_row_that_is_none_is_told_and_never_ends_the_run(tmp_path: Path):
    lines = [
        "\ufeff" + ROW % (0, 1),
        "",
        "not json",
        '{"timestamp": 0, "input_length": 20, "output_length": 8}',
        '{"timestamp": 0, "input_length": 0, "output_length": 8, "hash_ids": []}',
        '{"timestamp": 0, "input_length": 5, "output_length": 0, "hash_ids": [0]}',
        '{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [0]}',
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}',
        "   ",
        ROW % (7, 2),
    ]
    trace = read(a_file(tmp_path, *lines))
    assert [row.block_ids for row in trace.rows] == [(0, 1), (0, 2)]
    assert [bad.line for bad in trace.bad] == [3, 4, 5, 6, 7, 8]
    assert trace.num_blank == 2
    assert all(bad.reason for bad in trace.bad)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_t06_each_row_is_read_once_and_in_order(tmp_path: Path, name: str):
    rows = [TraceRow(3 * i / 1000, 512 + i, 1 + i, (0, i + 1)) for i in range(1, 500)]
    rows.insert(0, TraceRow(0.0, 512, 1, (0,)))
    write_mooncake(tmp_path / name, rows)
    assert read(tmp_path / name).rows == rows


def test_hashes_are_distinct_in_both_halves_and_between_salts():
    halves = set()
    for salt in (0, 1):
        for digest in split_hashes(hashes_of(tuple(range(1000)), salt)):
            halves |= {digest[:8], digest[8:]}
    assert len(halves) == 2 * 2 * 1000


def test_only_whole_blocks_have_hashes():
    row = TraceRow(0.0, 1023, 1, (5, 6))
    assert row.hashes(512, 0) == hashes_of((5,), 0)


@pytest.mark.parametrize("source", [sample, conversation])
def test_conversation_traces_share_block_0_and_chain_their_ids(source):
    before: dict[int, int] = {}
    for row in source():
        assert row.block_ids[0] == 0
        for parent, block in zip(row.block_ids, row.block_ids[1:], strict=False):
            assert before.setdefault(block, parent) == parent

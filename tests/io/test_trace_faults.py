"""Broken trace files: what is wrong costs its own row, is told with its line, and ends nothing."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from rtp.core.errors import ConfigError
from rtp.core.trace import TraceRow
from rtp.core.trace_facts import facts
from rtp.io import traces
from rtp.io.traces import Trace
from tests.io.test_trace_formats import AZURE, BURST_3, a_file, bailian, request, weka

RTP = '{"rtp_trace": 1, "block_size": 16}'
WINDOW = "0,1.0,1.0,Gamma,1.0,1.0"
LENGTHS = {"0": {"input_tokens": "{100: 1.0}", "output_tokens": "{10: 1.0}"}}
HUGE = "1" + 30 * "0"


def own(at: float, ids: list[int], **more: object) -> str:
    row = {"arrival_s": at, "num_tokens": 20, "num_output": 3, "block_ids": ids}
    return json.dumps(row | more)


def mooncake(ms: float, tokens: int, *ids: int, output: int = 1) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return json.dumps(dict(zip(names, (ms, tokens, output, ids), strict=True)))


# ---------------------------------------------------------------- rows that can be none

SOUND = own(0, [0, 1])
CASES: dict[str, tuple[str, list[str], int, str]] = {
    "a thought below 0": (
        "t.jsonl",
        [RTP, SOUND, own(1, [0, 1], after=0, think_s=-50)],
        3,
        "think time -50 s",
    ),
    "a thought without an end": (
        "t.jsonl",
        [RTP, SOUND, own(1, [0, 1], after=0, think_s=1e300)],
        3,
        "think time 1e+300 s",
    ),
    "a row before the one it waits for": (
        "t.jsonl",
        [RTP, own(10, [0, 1]), own(0, [0, 1], after=0)],
        3,
        "waits for a row that comes after it",
    ),
    "more block ids than blocks": (
        "t.jsonl",
        [RTP, SOUND, own(1, list(range(50)))],
        3,
        "50 block ids for 20 tokens, which are 2",
    ),
    "seconds in place of milliseconds": (
        "t.jsonl",
        [mooncake(0, 9, 1), mooncake(1.7e12, 9, 1)],
        2,
        "1.7e+09 s from the first row",
    ),
    "a time before the first one's year": (
        "t.jsonl",
        [mooncake(1.7e12, 9, 1), mooncake(0, 9, 1)],
        2,
        "1.7e+09 s from the first row",
    ),
    "JSON nested without an end": (
        "t.jsonl",
        [mooncake(0, 9, 1), '{"x": ' + 99_999 * "["],
        2,
        "recursion",
    ),
    "an answer that took less than no time": (
        "t.csv",
        [BURST_3, "1,s,1,m,50,5,55", "2,s,-8,m,50,5,55"],
        3,
        "Elapsed time -8 s",
    ),
    "an answer from before all time": (
        "t.csv",
        [BURST_3, "1,s,1,m,50,5,55", "2,s,-inf,m,50,5,55"],
        3,
        "Elapsed time '-inf' is no number",
    ),
    "a carriage return inside a line": (
        "t.csv",
        [AZURE, "2023-11-16 18:17:03,5,5", "2023-11-16 18:17:04,5\r0,5"],
        3,
        "no line of a CSV file",
    ),
    "a cell without an end": (
        "t.csv",
        [AZURE, "2023-11-16 18:17:03,5,5", f"2023-11-16 18:17:04,{140_000 * '9'},5"],
        3,
        "no line of a CSV file",
    ),
    "a number beyond all prompts": (
        "t.csv",
        [AZURE, f"2023-11-16 18:17:03,{HUGE},5", "2023-11-16 18:17:04,500,5"],
        2,
        "more than",
    ),
    "the same of BurstGPT": (
        "t.csv",
        [BURST_3, f"1,s,1,m,{HUGE},5,55", "2,s,1,m,50,5,55"],
        2,
        "more than",
    ),
}


@pytest.mark.parametrize(("name", "lines", "line", "says"), CASES.values(), ids=CASES)
def test_t11_a_line_that_can_be_no_request_is_told(
    tmp_path: Path, name: str, lines: list[str], line: int, says: str
):
    trace = traces.read(a_file(tmp_path, name, *lines))
    assert [bad.line for bad in trace.bad] == [line]
    assert says in trace.bad[0].reason
    assert len(trace.bad[0].reason) < 200
    (row,) = trace.rows
    assert row.block_ids[0] in (0, 1), "the bad row took no number"


def test_the_peak_of_a_trace_takes_no_memory_for_its_empty_seconds():
    found = facts([TraceRow(at, 9, 1, (0,)) for at in (0.0, 0.5, 3e13)], 16, (), ())
    assert found.peaks[1] == pytest.approx(2 * (3e13 + 1) / 3)


# ---------------------------------------------------------------- blocks


def test_a_renamed_block_meets_no_number_of_the_file(tmp_path: Path):
    beyond = 1 << 48
    trace = traces.read(
        a_file(
            tmp_path,
            "t.jsonl",
            mooncake(0, 600, beyond, 9),
            mooncake(1, 1024, 1, 5),
            mooncake(2, 1536, 2, 5, 6),
            mooncake(3, 600, beyond + 1, 9),
        )
    )
    parents: dict[int, int] = {}
    for row in trace.rows:
        for parent, block in zip((-1, *row.block_ids), row.block_ids, strict=False):
            assert parents.setdefault(block, parent) == parent
    assert trace.rows[0].block_ids == (beyond, 9)


def test_the_blocks_of_a_bad_row_rename_none_of_a_good_one(tmp_path: Path):
    trace = traces.read(
        a_file(tmp_path, "t.jsonl", mooncake(0, 1024, 5, 7, output=0), mooncake(0, 1024, 6, 7))
    )
    assert (trace.rows[0].block_ids, trace.num_renamed, len(trace.bad)) == ((6, 7), 0, 1)


def test_a_number_out_of_range_costs_no_other_session(tmp_path: Path):
    odd = request(0, 64, 1, 0) | {"hash_ids": [(1 << 63) - 1]}
    path = weka(tmp_path, [odd], [odd | {"hash_ids": [-1]}], [request(0, 640, 1, 0)])
    trace = traces.read(path, gap_s=0.0)
    assert [bad.line for bad in trace.bad] == [2]
    assert [row.tenant for row in trace.rows] == ["s0", "s2"]
    assert not {*trace.rows[0].block_ids} & {*trace.rows[1].block_ids}


# ---------------------------------------------------------------- sessions


def test_no_bailian_row_without_a_parent_joins_the_chat_numbered_like_that(tmp_path: Path):
    lines = [bailian(chat, -1, chat + 1, 16, 5) for chat in (-1, 0, 1)]
    assert [row.session for row in traces.read(a_file(tmp_path, "b", *lines)).rows] == [0, 1, 2]


def test_turns_of_a_burstgpt_session_follow_each_other_in_time_not_in_the_file(tmp_path: Path):
    path = a_file(
        tmp_path, "b.csv", BURST_3, "100,s,5,m,3,5,8", "10,s,5,m,1,5,6", "110,s,1,m,2,5,7"
    )
    assert [(r.arrival_s, r.after, r.think_s) for r in traces.read(path).rows] == [
        (0.0, -1, 0.0),
        (90.0, 0, 85.0),
        (100.0, 1, 5.0),
    ]


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (request(5, 640, 1, 2.0), "t 5 is before 10"),
        (request(20, 640, 1, -5.0), "think time -5 s"),
        (request(20, 640, -5.0, 0.0), "api_time -5 s"),
    ],
)
def test_a_request_out_of_time_is_told_and_its_session_goes_on(
    tmp_path: Path, odd: dict, says: str
):
    path = weka(
        tmp_path, [request(0, 640, 1, 0), request(10, 640, 1, 9), odd, request(40, 640, 1, 2.0)]
    )
    trace = traces.read(path)
    assert [(bad.line, says in bad.reason) for bad in trace.bad] == [(1, True)]
    assert [(row.after, row.think_s) for row in trace.rows] == [(-1, 0), (0, 9), (1, 29)]


def test_thoughts_cut_to_nothing_keep_requests_in_their_order(tmp_path: Path):
    steps = [request(i / 3 + i * i / 7, 64, 0.0, 0.1) for i in range(200)]
    trace = traces.read(weka(tmp_path, steps, steps), most_think_s=0.0)
    assert (len(trace.rows), trace.bad) == (400, [])
    assert all(row.after < index for index, row in enumerate(trace.rows))


def test_sessions_cannot_start_infinitely_far_apart(tmp_path: Path):
    with pytest.raises(ConfigError, match="gap_s of trace format weka"):
        traces.read(weka(tmp_path, [request(0, 64, 1, 0)]), gap_s="inf")


# ---------------------------------------------------------------- headers, archives


@pytest.mark.parametrize("before", ["", "\ufeff", "\n\n", "\ufeff\n \n"])
def test_a_header_may_stand_behind_blank_lines_and_a_byte_order_mark(tmp_path: Path, before: str):
    for header, row in ((RTP, SOUND), (AZURE, "2023-11-16 18:17:03,5,5")):
        trace = traces.read(a_file(tmp_path, "t", before + header, row))
        assert (len(trace.rows), trace.bad, trace.num_blank) == (1, [], before.count("\n"))


def test_blocks_larger_than_any_prompt_are_none(tmp_path: Path):
    path = a_file(tmp_path, "t.jsonl", RTP.replace("16", HUGE[:-5]), SOUND)
    with pytest.raises(ConfigError, match="block"):
        traces.read(path)
    with pytest.raises(ConfigError, match="block_size of trace format mooncake"):
        traces.read(a_file(tmp_path, "m.jsonl", mooncake(0, 9, 1)), block_size=10**12)


def tar(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


def client(name: str, window: str = WINDOW, lengths: object = LENGTHS) -> dict[str, str]:
    return {f"{name}-trace.csv": window + "\n", f"{name}-dataset.json": json.dumps(lengths)}


def read_clients(folder: Path, *clients: dict[str, str], **options: object) -> Trace:
    path = folder / "clients.tar"
    path.write_bytes(tar({name: text for each in clients for name, text in each.items()}))
    return traces.read(path, **options)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def test_every_damage_of_a_compressed_file_or_archive_is_an_error_with_its_name(tmp_path: Path):
    plain = tar(client("a") | client("b"))
    zipped = gzip.compress(plain)
    lines = gzip.compress(b"".join(mooncake(i, 9, i).encode() + b"\n" for i in range(999)))
    damaged = {
        "crc.tar.gz": flipped(zipped, len(zipped) - 8),
        "cut.tar.gz": zipped[: len(zipped) // 2],
        "data.tar.gz": flipped(zipped, len(zipped) // 2),
        "header.tar": flipped(plain, plain.index(b"b-trace.csv")),
        "none.tar": b"hello",
        "none.tar.gz": gzip.compress(b"hello"),
        "crc.jsonl.gz": flipped(lines, len(lines) - 8),
        "data.jsonl.gz": flipped(lines, len(lines) // 2),
    }
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=f"{name}: damaged") as told:
            traces.read(tmp_path / name, "servegen" if ".tar" in name else "mooncake")
        assert "\n" not in str(told.value)


# ---------------------------------------------------------------- ServeGen


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ("{100: 0.0}", "no sum to draw by"),
        ("{100: -1.0, 5: 2}", "-1.0 is the probability of no length"),
        ("{100: 1e999, 5: 0.2}", "inf is the probability"),
        ("{100: 'x'}", "'x' is the probability"),
        ("{99999999: 1.0}", "length 99999999"),
        ("{0: 1.0}", "length 0 "),
        ("{[]: 1}", "no map of lengths: unhashable"),
        (f"{5000 * '('}{5000 * ')'}", "no map of lengths"),
        ("__import__('os')", "malformed"),
    ],
)
def test_t11_lengths_that_nothing_can_be_drawn_from_are_told(
    tmp_path: Path, lengths: str, says: str
):
    odd = {"0": {"input_tokens": lengths, "output_tokens": "{10: 1.0}"}}
    trace = read_clients(tmp_path, client("a"), client("b", lengths=odd))
    assert {row.tenant for row in trace.rows} == {"a"}
    assert trace.bad[0].reason.startswith("b-dataset.json: ")
    assert says in trace.bad[0].reason


def test_t11_a_window_of_no_burstiness_that_can_be_drawn_is_told(tmp_path: Path):
    trace = read_clients(tmp_path, client("a", f"{WINDOW}\n600,1,1e-200,,0,0"))
    assert [(bad.line, "without an end" in bad.reason) for bad in trace.bad] == [(2, True)]


def test_clients_of_one_name_in_two_folders_are_two(tmp_path: Path):
    other = {"0": {"input_tokens": "{999: 1.0}", "output_tokens": "{10: 1.0}"}}
    trace = read_clients(tmp_path, client("x/c"), client("y/c", lengths=other), client("y/d"))
    assert {(row.tenant, row.num_tokens) for row in trace.rows} == {
        ("x/c", 100),
        ("y/c", 999),
        ("d", 100),
    }


def test_a_rate_is_kept_where_clients_without_lengths_fall_out(tmp_path: Path):
    long = "\n".join(WINDOW.replace("0", str(600 * i), 1) for i in range(6))
    bare = {"b-trace.csv": long}
    trace = read_clients(tmp_path, client("a", long), bare, rate=1.0)
    assert len(trace.rows) == pytest.approx(3600, rel=0.1)
    assert "b has no lengths" in trace.bad[0].reason

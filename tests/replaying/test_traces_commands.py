"""`python -m rtp.replay describe|convert|formats`: what is told, and how mistakes are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rtp.core.ideal_cache import found
from rtp.io import traces
from rtp.replay import main
from tests.support.traces import SAMPLE, sample
from traces.generate import FOLDER

MOONCAKE = '{"timestamp": %d, "input_length": 600, "output_length": 8, "hash_ids": [0, %d]}\n'


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert main(words) == 0
    out, err = capsys.readouterr()
    return out, err


def test_describe_prints_both_rules_the_sizes_and_round_robin(capsys: pytest.CaptureFixture[str]):
    out, err = said(capsys, "describe", "--trace", str(SAMPLE), "--sizes", "300,9000")
    engine, partial = found(sample(), 512), found(sample(), 512, partial=True)
    shares = next(line for line in out.splitlines() if line.startswith("one cache without an end"))
    assert shares.split()[-3:] == [
        f"{engine.token_share:.2%}",
        f"{partial.token_share:.2%}",
        f"{partial.block_share:.2%}",
    ]
    for name in ("LRU, 300 blocks", "LRU, 9,000 blocks", *(f"over {n} " for n in (4, 8, 16, 32))):
        assert name in out
    assert "992 requests" in out
    assert not err


def test_describe_as_json_has_the_bad_rows_and_all_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "t.jsonl"
    path.write_text(MOONCAKE % (0, 1) + "\n" + "nonsense\n" + MOONCAKE % (3000, 1))
    out, err = said(capsys, "describe", "--trace", str(path), "--as-json", "true")
    told = msgspec.json.decode(out)
    assert (told["num_blank"], [bad["line"] for bad in told["bad"]]) == (1, [3])
    assert told["facts"]["num_rows"] == 2
    assert told["facts"]["engine"]["endless"]["found_tokens"] == 512
    assert told["facts"]["partial"]["endless"]["found_tokens"] == 600
    assert told["facts"]["partial"]["round_robin"]["4"]["found_tokens"] == 0
    assert "line 3: " in err


def test_convert_keeps_all_in_rtps_form_and_the_shape_in_mooncakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source, own, plain = FOLDER / "sample_weka.jsonl.gz", tmp_path / "a.jsonl.gz", tmp_path / "b"
    rows = traces.read(source).rows
    said(capsys, "convert", "--trace", str(source), "--out", str(own))
    assert traces.read(own).rows == rows
    told, _ = said(capsys, "convert", "--trace", str(own), "--out", str(plain), "--to", "mooncake")
    assert "read it with --set reader.block_size=64" in told
    assert f"{sum(row.after >= 0 for row in rows)} rows wait for another no longer" in told
    again = traces.read(plain, block_size=64)
    assert again.bad == []
    assert [(r.num_tokens, r.num_output) for r in again.rows] == [
        (r.num_tokens, r.num_output) for r in rows
    ]
    assert [r.hashes(64, 0) for r in again.rows] == [r.hashes(64, 0) for r in rows]


def test_convert_cuts_opens_and_spreads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [tmp_path / f"{i}.jsonl" for i in range(3)]
    for file, seed in zip(files, ("1", "1", "2"), strict=True):
        said(
            capsys,
            *("convert", "--trace", str(SAMPLE), "--rows", "60"),
            *("--spread-seed", seed, "--out", str(file)),
        )
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    times = [row.arrival_s for row in traces.read(files[0]).rows]
    assert len(set(times)) == len(times) == 60
    agents = FOLDER / "sample_weka.jsonl.gz"
    said(
        capsys,
        *("convert", "--trace", str(agents), "--loop", "open", "--out", str(files[0])),
        *("--set", "reader.gap_s=0"),
    )
    rows = traces.read(files[0]).rows
    assert all(row.after == -1 for row in rows)
    assert sum(row.arrival_s == 0.0 for row in rows) == 4


def test_the_formats_and_their_options_are_listed(capsys: pytest.CaptureFixture[str]):
    out, _ = said(capsys, "formats")
    for name in traces.FORMATS:
        assert f"{name}: " in out
    assert "--set reader.gap_s=...  Mean seconds between the starts" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["describe"], "give --trace FILE"),
        (["convert", "--trace", str(SAMPLE)], "give --out FILE"),
        (["describe", "--trace", "/nowhere/t.jsonl"], "/nowhere/t.jsonl: No such file"),
        (["describe", "--trace", str(SAMPLE), "--format", "csv"], "no trace format 'csv'"),
        (["describe", "--trace", str(SAMPLE), "--set", "reader.gap_s=1"], "no option 'gap_s'"),
        (["describe", "--trace", str(SAMPLE), "--sizes", "0"], "sizes"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_t11_a_trace_without_a_single_request_is_an_error_that_tells_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + MOONCAKE.replace("600", "0") % (0, 1))
    assert main(["describe", "--trace", str(path)]) == 2
    err = capsys.readouterr().err
    assert "no row is a request" in err
    assert "1 blank lines, 1 bad ones, line 2" in err


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["ablate"],
        ["plan", "--ttft-p95-s", "9", "--most", "1"],
        ["tune", "--rounds", "1", "--points", "1"],
    ],
)
def test_t11_every_command_tells_the_bad_rows_it_leaves_out(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "odd.jsonl"
    path.write_text(MOONCAKE % (0, 1) + "nonsense\n" + MOONCAKE % (3000, 1))
    _, err = said(capsys, *words, "--trace", str(path), "--decode", "false", "--jobs", "1")
    assert "odd: 1 bad rows, not in the trace:\n  line 2: " in err


def test_further_traces_of_tune_are_read_like_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first, other, none = (tmp_path / f"{name}.jsonl" for name in ("first", "other", "none"))
    first.write_text("".join(MOONCAKE % (3000 * i, i) for i in range(1, 5)))
    other.write_text("".join(MOONCAKE % (3000 * i, i) for i in range(1, 10)) + "nonsense\n")
    none.write_text("nonsense\n")
    words = ("tune", "--rounds", "1", "--points", "1", "--jobs", "1", "--decode", "false")
    words += ("--trace", str(first), "--rows", "4", "--format", "mooncake")
    words += ("--out", str(tmp_path / "t"), "--also")
    _, err = said(capsys, *words, str(other))
    assert "other: 1 bad rows" in err
    results = msgspec.json.decode((tmp_path / "t").read_bytes())["tuned"]["results"]
    assert {r["stats"]["requests"] for r in results if r["on"] == "other.jsonl"} == {4}
    assert main([*words, str(none)]) == 2
    assert "none.jsonl: no row is a request" in capsys.readouterr().err


def test_convert_spreads_no_rows_that_lie_on_no_grid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, out = tmp_path / "t.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(MOONCAKE % (at, at) for at in (0, 13, 400)))
    words = ["convert", "--trace", str(path), "--out", str(out), "--spread-s", "2"]
    assert main(words) == 2
    assert "without --spread-seed" in capsys.readouterr().err
    assert main([*words[:-2], "--spread-seed", "1"]) == 2
    assert "the rows lie on no grid" in capsys.readouterr().err
    said(capsys, *words, "--spread-seed", "1")
    assert len(traces.read(out).rows) == 3

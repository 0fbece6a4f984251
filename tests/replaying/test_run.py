"""`python -m rtp.replay run` in virtual time: results, their bytes, and how mistakes are told."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from rtp.replay import main
from tests.support.traces import SAMPLE

FEW = ["--trace", str(SAMPLE), "--rows", "40", "--decode", "false"]


def run(out: Path, *options: str) -> dict:
    assert main(["run", *FEW, "--out", str(out), *options]) == 0
    return msgspec.json.decode(out.with_name(out.name + ".json").read_bytes())


def test_policies_are_compared_over_arrival_seeds(tmp_path: Path):
    result = run(tmp_path / "r", "--policy", "predicted_ttft,random@early", "--seeds", "2")
    ours, random = result["policies"]
    assert (ours["name"], ours["early"], ours["differences"]) == ("predicted_ttft", False, {})
    assert (random["routing"], random["early"]) == ("random", True)
    assert [r["seed"] for r in random["runs"]] == [0, 1]
    assert {r["stats"]["ended"] for p in (ours, random) for r in p["runs"]} == {40}
    assert random["differences"]["ttft_s.p95"]["mean"] > 0
    assert random["differences"]["ttft_s.p95"]["low"] is not None
    assert result["trace"]["rows"] == 40
    assert "--seeds=2" in result["command"]
    page = (tmp_path / "r.html").read_text()
    assert "random@early" in page
    assert "/*DATA*/" not in page


def test_the_same_seed_gives_the_same_bytes_on_any_number_of_cores(tmp_path: Path):
    options = ("--policy", "predicted_ttft,rtp_score", "--seeds", "2", "--seed", "5")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run(tmp_path / "a" / "r", *options, "--jobs", "1")
    run(tmp_path / "b" / "r", *options, "--jobs", "3")
    for name in ("r.json", "r.html"):
        one, other = ((tmp_path / d / name).read_text().replace(f"/{d}/", "/") for d in "ab")
        assert one == other


def test_the_command_of_a_result_repeats_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ("--policy", "rtp_score", "--set", "params.rtp_score.gamma=0.5", "--speed", "2")
    first = run(tmp_path / "r", *options)
    words = shlex.split(first["command"])
    assert words[:4] == ["python", "-m", "rtp.replay", "run"]
    before = (tmp_path / "r.json").read_bytes()
    assert main(words[3:]) == 0
    assert (tmp_path / "r.json").read_bytes() == before


def test_a_name_that_looks_like_markup_is_data(tmp_path: Path):
    trace = tmp_path / "<script>alert(1).jsonl"
    trace.write_text('{"timestamp":0,"input_length":5,"output_length":2,"hash_ids":[0]}\n')
    assert main(["run", "--trace", str(trace), "--out", str(tmp_path / "r")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "<script>alert" not in page
    assert page.count("<script") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give --trace FILE"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        ([*FEW, "--policy", "best"], "no routing named 'best'"),
        ([*FEW, "--set", "params.rtp_score.gamma=1"], "no --policy names"),
        ([*FEW, "--policy", "rtp_score", "--set", "params.rtp_score.x=1"], "unexpected keyword"),
        ([*FEW, "--speed", "0"], "speed"),
        ([*FEW, "--spede", "1"], "unrecognized"),
        ([*FEW, "--out", "/nowhere/r"], "/nowhere/r is no file in a folder"),
        ([*FEW, "--policy", ","], "policy"),
        ([*FEW, "--fault", "nan:lost:w0"], "lost has a time and no number"),
        ([*FEW, "--fault", "0:slow:w0:0"], "slow has a time and a number over 0"),
        ([*FEW, "--fault", "0:slow:w0/00:3"], "w0/00', which there is not"),
        ([*FEW, "--fault", "5:back:w0"], "w0 was not lost before 5 s"),
        ([*FEW, "--set", "master.lead_s=-1"], "master.lead_s is from 0 up"),
        ([*FEW, "--set", "master.lead_s=abc"], "valid number"),
        ([*FEW, "--set", "master.without=order"], "Sequence"),
        ([*FEW, "--latency-s", "10"], "latency_s"),
        ([*FEW, "--set", "master.leed_s=1"], "master.leed_s is no setting"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    argv: list[str], words: str, capfd: pytest.CaptureFixture[str]
):
    try:
        code = main(["run", *argv, "--jobs", "1"])
    except SystemExit as end:
        code = end.code
    assert code == 2
    error = capfd.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_seeds_need_a_grid_or_a_width(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    trace = tmp_path / "t.jsonl"
    line = '{{"timestamp":{at},"input_length":600,"output_length":2,"hash_ids":[0,{at}]}}\n'
    trace.write_text("".join(line.format(at=at) for at in (0, 13, 29, 400, 410)))
    options = ["--trace", str(trace), "--seeds", "2", "--decode", "false"]
    assert main(["run", *options]) == 2
    assert "give --spread-s" in capfd.readouterr().err
    assert main(["run", *options, "--spread-s", "1"]) == 0


def test_an_unknown_command_names_those_there_are(capfd: pytest.CaptureFixture[str]):
    assert main(["fly"]) == 2
    assert "no command 'fly'; there are " in capfd.readouterr().err
    assert main([]) == 0
    assert "run " in capfd.readouterr().out


BAD_POLICY = """
from rtp.core.policy import Candidates, Predict, Query


class Bad:
    def score(self, query: Query, candidates: Candidates, predict: Predict):
        raise ValueError("boom")


def build() -> Bad:
    return Bad()
"""


def test_a_policy_that_fails_is_told_and_its_figures_are_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package/bad.py").write_text(BAD_POLICY)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run(tmp_path / "r", "--policy", "a_package.bad")
    assert result["policies"][0]["runs"][0]["stats"]["fallbacks"] == 40
    told = capfd.readouterr().err
    assert "a_package.bad: the policy failed in 40 decisions" in told
    assert "raised ValueError: boom" in told


def test_a_fault_that_comes_too_late_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run(tmp_path / "r", "--fault", "50000:lost:w0")
    assert "before lost could strike w0 at 50000 s" in capfd.readouterr().err


def test_why_requests_failed_stands_below_the_table(capfd: pytest.CaptureFixture[str]):
    assert main(["run", *FEW, "--kv-blocks", "1", "--jobs", "1"]) == 0
    assert "predicted_ttft: 40 x 400 context_length_exceeded" in capfd.readouterr().out


def test_repeating_a_split_cluster_names_the_workers_beside_it(tmp_path: Path):
    options = ("--workers", "8", "--prefill-workers", "1", "--decode-workers", "1")
    told = run(tmp_path / "r", *options)["command"]
    assert "--workers=8" in told

"""`python -m rtp.replay ablate`, `tune` and `plan` on a few rows of the sample."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rtp.core.run_stats import Quantiles, Stats
from rtp.replay import main
from rtp.replaying.ablate import SWITCHES
from rtp.replaying.plan import Goal, Tried, divisions, smallest
from rtp.replaying.tables import table
from tests.support.traces import SAMPLE

FEW = ["--trace", str(SAMPLE), "--rows", "60", "--decode", "false", "--jobs", "1"]


def ablated_in(out: Path) -> list[dict[str, Any]]:
    found = msgspec.json.decode(out.read_bytes())
    assert found["command"].startswith("python -m rtp.replay ablate --")
    assert found["trace"]["rows"] == 60
    return found["ablated"]


def some_stats(p95_s: float, slo_share: float = 1.0, failed: int = 0) -> Stats:
    ttft_s = Quantiles(10, p95_s, p95_s, p95_s, p95_s, p95_s, p95_s, p95_s)
    return Stats(
        requests=10,
        ended=10 - failed,
        failed=failed,
        failures={},
        seconds=1.0,
        ttft_s=ttft_s,
        tpot_s=Quantiles(0),
        e2e_s=ttft_s,
        slo_share=slo_share,
        goodput=1.0,
        requests_per_s=1.0,
        prompt_tokens_per_s=1.0,
        output_tokens_per_s=1.0,
        hit_ratio=0.0,
        hits={},
        imbalance=None,
        retried=0,
        held=0,
        fallbacks=0,
        phases=None,
        queue_max=0,
        queue_mean=0.0,
    )


def test_ablation_has_a_run_for_each_mechanism(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "a.json"
    assert main(["ablate", *FEW, "--workers", "2", "--speed", "2", "--out", str(out)]) == 0
    found = {each["without"]: each["stats"] for each in ablated_in(out)}
    assert list(found) == ["", *(switch.name for switch in SWITCHES)]
    whole = found[""]["ttft_s"]["p95"]
    assert found["hold"]["held"] == 0 < found[""]["held"]
    assert found["order"]["ttft_s"]["p50"] > found[""]["ttft_s"]["p50"]
    assert found["late binding"]["ttft_s"]["p95"] != whole
    assert found["affinity"] == found[""], "this trace has no conversations"
    assert found["grouping"] == found[""], "these ranks do not step together"
    assert "without late binding" in capsys.readouterr().out


def test_ablation_of_another_policy_leaves_out_what_it_does_not_have(tmp_path: Path):
    out = tmp_path / "a.json"
    options = ["--policy", "round_robin", "--out", str(out)]
    assert main(["ablate", *FEW, *options]) == 0
    found = [each["without"] for each in ablated_in(out)]
    assert "hold" not in found
    assert "late binding" in found


def test_tuning_judges_its_result_on_rows_it_never_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "t.json"
    other = tmp_path / "other.jsonl"
    other.write_bytes(b"".join(gzip.decompress(SAMPLE.read_bytes()).splitlines(True)[:20]))
    few = ["--workers", "2", "--rounds", "1", "--points", "2", "--speeds", "1,2", "--rows", "40"]
    assert main(["tune", *FEW, *few, "--also", str(other), "--out", str(out)]) == 0
    tuned = msgspec.json.decode(out.read_bytes())["tuned"]
    assert len(tuned["tried"]) == 3
    assert tuned["tried"][0][1] <= 1.0, "the defaults are tried, too"
    on = [(r["on"], r["speed"], r["setting"]) for r in tuned["results"]]
    assert on[:3] == [("training part", 1.0, s) for s in ("tuned", "defaults", "no weights")]
    assert {name for name, *_ in on} == {"training part", "held out", "other.jsonl"}
    assert {r["stats"]["requests"] for r in tuned["results"] if r["on"] == "held out"} == {20}
    assert "held out" in capsys.readouterr().out


def test_planning_finds_the_fewest_ranks(tmp_path: Path):
    out = tmp_path / "p.json"
    goal = ["--ttft-p95-s", "14", "--most", "8"]
    assert main(["plan", *FEW, *goal, "--out", str(out)]) == 0
    found = msgspec.json.decode(out.read_bytes())
    need = found["planned"][0]["ranks"]
    held = {t["ranks"]: t["held"] for t in found["tried"]}
    assert held[need]
    assert not held[need - 1]


def test_planning_that_finds_nothing_says_so(capsys: pytest.CaptureFixture[str]):
    goal = ["--ttft-p95-s", "0.001", "--most", "2", "--rows", "10"]
    assert main(["plan", *FEW, *goal]) == 1
    assert "none of these" in capsys.readouterr().out


def test_every_division_of_a_size_is_tried():
    assert divisions(4, "fused") == [(0, 0)]
    assert divisions(4, "split") == [(1, 3), (2, 2), (3, 1)]
    assert divisions(3, "both") == [(0, 0), (1, 2), (2, 1)]
    assert divisions(1, "split") == []


@pytest.mark.parametrize("need", range(1, 10))
def test_bisection_finds_every_size(need: int):
    """9: none is enough."""
    sizes = range(1, 9)

    def run(cases: list[tuple[str, float, int, int, int]]) -> list[Tried]:
        return [Tried(*case, case[2] >= need, some_stats(1.0)) for case in cases]

    tried: Sequence[Tried] = smallest([("a", 1.0), ("b", 2.0)], sizes, "fused", run)
    for policy in "ab":
        held = [t.ranks for t in tried if t.policy == policy and t.held]
        assert min(held, default=9) == need
        assert len([t for t in tried if t.policy == policy]) <= 4


def test_a_goal_holds_when_all_of_it_does():
    goal = Goal(2.0, None, 0.9)
    assert goal.held(some_stats(1.9, 0.95))
    assert not goal.held(some_stats(2.1, 0.95))
    assert not goal.held(some_stats(1.9, 0.85))
    assert not goal.held(some_stats(1.9, 0.95, failed=1))
    assert not Goal(None, 0.1, None).held(some_stats(1.0)), "no token came after the first"


def test_tables_are_aligned():
    assert table(["name", "x"], [["a", "1"], ["bb", "10"]]) == (
        "| name |  x |\n|:-----|---:|\n| a    |  1 |\n| bb   | 10 |"
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ablate", *FEW, "--policy", "luck"], "no routing named 'luck'"),
        (["tune", *FEW, "--policy", "round_robin"], "say what of round_robin"),
        (["tune", *FEW, "--set", "space.lam=4:1"], "LOW under HIGH"),
        (["tune", *FEW, "--set", "space.lam=x"], "not LOW:HIGH"),
        (["tune", *FEW, "--set", "space.luck=0:1"], "no number 'luck'"),
        (["plan", *FEW], "give a goal"),
        (["plan", *FEW, "--ttft-p95-s", "1", "--ways", "split", "--dp", "2"], "--dp 1"),
        (["run", *FEW, "--fault", "1:gone:w0"], "no kind 'gone'"),
        (["run", *FEW, "--profile", "abacus"], "no profile named 'abacus'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(argv) == 2
    assert words in capsys.readouterr().err

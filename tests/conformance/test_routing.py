"""What every routing policy promises (rtp/policies/check), run over all that are found."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.policy import Candidates, Predict, Query
from rtp.core.types import FloatArray
from rtp.policies.check import CHECKS, main

NAMES = plugins.names("routing")


def test_the_policies_of_the_tree_are_found():
    assert {"least_loaded", "predicted_ttft", "random", "round_robin"} <= set(NAMES)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_policy_keeps_its_promises(name: str, check: str):
    reasons = plugins.check("routing", name)
    if reasons:
        pytest.skip("; ".join(reasons))
    assert CHECKS[check](partial(plugins.build, "routing", name)) == ""


class Wrong:
    """A policy that breaks one promise."""

    by_row = monotone = True

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.scores = np.zeros(9)

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        num = len(candidates.rank_ids)
        match self.fault:
            case "raises":
                raise KeyError("no such rank")
            case "shape":
                return np.zeros(num + 1)
            case "list":
                return [0.0] * num
            case "nan":
                return np.full(num, np.nan)
            case "divides":
                return candidates.kv_free / candidates.kv_total
            case "mutates":
                candidates.wait_s += 1.0
                return -candidates.wait_s
            case "other rows":
                return candidates.wait_s - candidates.wait_s.mean()
            case "likes load":
                return candidates.context_tokens - candidates.wait_s
            case "likes long prefills":
                return -candidates.matched_tokens
            case "its own dice":
                return np.random.default_rng().random(num)
            case _:
                if num == len(self.scores):
                    self.scores[:] = candidates.wait_s
                    return self.scores
                return np.zeros(num)


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("raises", "scores are one finite number per candidate", "raises KeyError"),
        ("shape", "scores are one finite number per candidate", "shape"),
        ("list", "scores are one finite number per candidate", "list, not an array"),
        ("nan", "scores are one finite number per candidate", "not finite"),
        ("divides", "idle and empty ranks are scored", "not finite"),
        ("mutates", "columns are only read", "writes into a column"),
        ("other rows", "rows stand alone if by_row says so", "depends on other rows"),
        ("likes load", "load is never liked if monotone says so", "more context_tokens"),
        ("likes long prefills", "load is never liked if monotone says so", "less of the prompt"),
        ("its own dice", "two of a kind decide alike", "differently"),
        ("same array", "scores stay as they were returned", "a later call changes"),
    ],
)
def test_each_check_finds_its_fault(fault: str, check: str, words: str):
    assert words in CHECKS[check](lambda: Wrong(fault))


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]):
    assert main(["predicted_ttft", "--set", "lam=2"]) == 0
    out = capsys.readouterr().out
    assert out.count("ok ") == len(CHECKS)
    assert "us a decision" in out
    assert main(["predicted_ttft", "--set", "lam=x"]) == 2
    assert "lam wants float" in capsys.readouterr().err


def test_the_command_fails_for_a_policy_that_does(capsys: pytest.CaptureFixture[str]):
    assert main(["tests.conformance.broken_policy"]) == 1
    assert "FAILED columns are only read" in capsys.readouterr().out

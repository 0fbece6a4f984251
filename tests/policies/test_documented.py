"""The policy that the documentation shows is complete and keeps what policies promise."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.errors import ConfigError
from rtp.core.policy import Candidates, Query
from rtp.policies.check import CHECKS, a_predictor, a_query, equal_candidates
from tests.core.test_plugins import as_module
from tests.support.fleet import Fleet

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text()


@pytest.fixture
def kv_shy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    source = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert source is not None
    return as_module(monkeypatch, source.group(1))


@pytest.mark.parametrize("check", CHECKS)
def test_the_example_keeps_its_promises(kv_shy: ModuleType, check: str):
    assert CHECKS[check](partial(kv_shy.build, penalty_s=0.5)) == ""


def test_the_example_does_what_it_says(kv_shy: ModuleType):
    columns = {"kv_free": np.array([100.0, 10.0]), "kv_total": np.full(2, 100.0)}
    offered = dataclasses.replace(equal_candidates(2), **columns)
    scores = kv_shy.build(penalty_s=1.0, start=0.8).score(a_query(), offered, a_predictor(2))
    assert scores[0] - scores[1] == pytest.approx(0.5), "half way from 80 % to full"


def test_the_example_refuses_nonsense_in_a_sentence(kv_shy: ModuleType):
    with pytest.raises(ConfigError, match="penalty_s from 0 up"):
        plugins.build("routing", kv_shy.__name__, penalty_s=-1)
    with pytest.raises(ConfigError, match="start wants float"):
        plugins.build("routing", kv_shy.__name__, start="x")


def test_the_example_places_requests(kv_shy: ModuleType):
    fleet = Fleet(kv_shy.build())
    for name in ("w0", "w1"):
        fleet.add(name)
    fleet.report(fleet.workers["w0"], kv_free=2_000, running=1)
    assert fleet.grant(fleet.ask(100)).worker_id == "w1"
    assert fleet.master.overview(fleet.now)["policy"]["fallbacks"] == 0


def test_every_column_and_field_is_documented():
    words = set(re.findall(r"`(\w+)`", PAGE))
    fields = getattr(Query, "__struct_fields__", None) or Query.__dataclass_fields__
    assert set(Candidates.__dataclass_fields__) | set(fields) <= words

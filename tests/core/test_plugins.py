"""Choices by name: what is found, and what a wrong name, parameter or value says."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from rtp.core import plugins
from rtp.core.errors import ConfigError

NAMES = plugins.names("routing")
Made = dict[str, object]


def as_module(monkeypatch: pytest.MonkeyPatch, source: str) -> ModuleType:
    """A user's module, importable by its dotted name."""
    for name in ("users", "users.choice"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = sys.modules["users.choice"]
    exec(source, module.__dict__)
    return module


def a_module(monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    return as_module(monkeypatch, source).__name__


def test_an_unknown_name_shows_the_choices():
    with pytest.raises(ConfigError, match=r"no routing named 'nearest'.*predicted_ttft"):
        plugins.build("routing", "nearest")
    with pytest.raises(ConfigError, match=r"'no\.such\.module' \(Python finds no module 'no'\)"):
        plugins.build("routing", "no.such.module")


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_parameter_names_the_policy_and_what_it_takes(name: str):
    with pytest.raises(ConfigError, match=rf"routing '{name}': .*'lamda'; it takes "):
        plugins.build("routing", name, lamda=1)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("predicted_ttft", {"lam": "abc"}),
        ("predicted_ttft", {"lam": True}),
        ("predicted_ttft", {"excess": None}),
        ("random", {"seed": 1.5}),
        ("dynamo_kv", {"seed": "x"}),
        ("rtp_score", {"literal": "yes"}),
        ("sglang_cache_aware", {"balance_abs": [1]}),
    ],
)
def test_a_value_of_another_type_names_the_parameter_and_what_it_takes(name: str, params: Made):
    (parameter,) = params
    with pytest.raises(ConfigError, match=rf"'{name}': {parameter} wants .*; it takes "):
        plugins.build("routing", name, **params)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_value_out_of_range_is_an_error(value: float):
    with pytest.raises(ConfigError, match="predicted_ttft takes"):
        plugins.build("routing", "predicted_ttft", lam=value)


def test_a_whole_number_is_good_for_a_float():
    assert repr(plugins.build("routing", "predicted_ttft", lam=2)) == repr(
        plugins.build("routing", "predicted_ttft", lam=2.0)
    )


def test_a_users_module_is_found_by_its_dotted_path(monkeypatch: pytest.MonkeyPatch):
    path = a_module(monkeypatch, "def build(weight=1.0): return ('built', weight)")
    assert plugins.build("routing", path, weight=3) == ("built", 3)
    assert plugins.is_own("routing", "predicted_ttft")
    assert not plugins.is_own("routing", path)


def test_an_installed_package_adds_a_name_by_an_entry_point(monkeypatch: pytest.MonkeyPatch):
    path = a_module(monkeypatch, "def build(weight=1.0): return ('built', weight)")
    entry = EntryPoint("kv_shy", path, "rtp.routing")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry][: group == "rtp.routing"])
    assert "kv_shy" in plugins.names("routing")
    assert plugins.build("routing", "kv_shy", weight=2) == ("built", 2)
    assert not plugins.is_own("routing", "kv_shy")


def test_a_module_without_build_is_no_plugin(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"no build\(\)"):
        plugins.build("routing", a_module(monkeypatch, ""))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def build(:", r"invalid syntax \(unread\.py, line 1\)"),
        ("import no_such_library", "No module named 'no_such_library'"),
        ("from rtp.core.policy import Nothing", "cannot import name 'Nothing'"),
    ],
)
def test_a_users_file_that_python_cannot_read_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, reason: str
):
    package = tmp_path / "unreadable"
    package.mkdir()
    (package / "unread.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"'unreadable.unread' cannot be read: {reason}"):
        plugins.build("routing", "unreadable.unread")


@pytest.mark.parametrize("error", ["ValueError", "TypeError"])
def test_what_a_users_build_refuses_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, error: str
):
    path = a_module(monkeypatch, f"def build(depth=1): raise {error}('depth is odd')")
    with pytest.raises(ConfigError, match=r"users\.choice': depth is odd; it takes depth=1"):
        plugins.build("routing", path)


def test_a_plugin_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch):
    path = a_module(monkeypatch, "def check(): return ['no oracle here']\ndef build(): pass")
    with pytest.raises(ConfigError, match="cannot run here: no oracle here"):
        plugins.build("routing", path)

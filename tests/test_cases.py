"""Every case of cases.toml is a test that carries its id, or names the capability it waits for (one
that waits may have tests of a part already)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def test_every_case_is_a_test_or_waits_for_a_capability():
    cases = tomllib.loads((TESTS / "cases.toml").read_text())
    named: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for name, body in re.findall(r"def (test_\w+)(.*?)(?=\n\S|\Z)", path.read_text(), re.S):
            named |= {i.upper() for i in re.findall(r"(?<![a-z0-9])([a-z]\d\d)(?![0-9])", name)}
            head = re.search(r'"""(.*?)"""', body, re.S)
            named |= set(re.findall(r"\b[A-Z]\d\d\b", head.group(1))) if head else set()
    missing = sorted(i for i, case in cases.items() if "needs" not in case and i not in named)
    assert not missing, f"no test carries {', '.join(missing)}"

"""How every benchmark reports: the machine, the ratios first, one JSON line of claims last."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Claim:
    """One figure an issue or the README asks for."""

    what: str
    value: float
    target: float
    better: Literal["higher", "lower"]

    @property
    def holds(self) -> bool:
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


def machine() -> str:
    """One line: commit, cores, CPU, Python, load at start."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return (
        f"commit {commit or 'unknown'}, {os.cpu_count()} cores {model}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> str:
    """median (lowest-highest)"""
    return f"{median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def finish(bench: str, claims: Sequence[Claim]) -> None:
    """Prints each claim against its target, then the JSON line."""
    for claim in claims:
        sign = "at least" if claim.better == "higher" else "at most"
        state = "holds" if claim.holds else "FALLS SHORT"
        print(f"{state}: {claim.what} = {claim.value:.3g} ({sign} {claim.target:g})")
    print(json.dumps({"bench": bench, "claims": [asdict(c) for c in claims]}))

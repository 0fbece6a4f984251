"""Drawing from published figures, and files that are the same each time."""

from __future__ import annotations

import gzip
import math
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

SHARES = (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)


class Lengths:
    """A number of tokens by its least value and its percentiles 50, 90, 95, 99 and 100; between
    two of them its logarithm is even."""

    def __init__(self, *values: float) -> None:
        self._logs = [math.log(value) for value in values]

    def __call__(self, random: Random) -> int:
        share = random.random()
        at = bisect_right(SHARES, share) - 1
        part = (share - SHARES[at]) / (SHARES[at + 1] - SHARES[at])
        return round(math.exp(self._logs[at] + part * (self._logs[at + 1] - self._logs[at])))


def gap(random: Random, rate: float, cv: float) -> float:
    """Between two arrivals: Gamma, by mean and coefficient of variation."""
    shape = cv**-2
    return random.gammavariate(shape, 1 / (shape * rate))


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:  # Any: what JSON holds
    """Gzipped if the name ends so."""
    text = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)

"""A trace in the form of Azure's conversation trace of 2023."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from random import Random

from traces.draw import Lengths, gap

SEED, ROWS = 1, 600
RATE, CV = 19_366 / 3_501.7, 1.09
TOKENS_IN = Lengths(200, 1020, 2734, 4083, 4142, 14_050)
TOKENS_OUT = Lengths(20, 129, 424, 451, 601, 1000)
START = datetime(2023, 11, 16, 18, 0, 0)


def write(path: Path) -> None:
    random, at = Random(SEED), 0.0
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(ROWS):
        ticks = round(at * 10_000_000)
        second = START + timedelta(seconds=ticks // 10_000_000)
        time = f"{second:%Y-%m-%d %H:%M:%S}.{ticks % 10_000_000:07d}"
        lines.append(f"{time},{TOKENS_IN(random)},{TOKENS_OUT(random)}")
        at += gap(random, RATE, CV)
    path.write_bytes("\r\n".join(lines).encode())

"""Client parameters in the form of ServeGen's: a few clients with much of the load, more with
little, some of them bursty, each with lengths of its own."""

from __future__ import annotations

import gzip
import io
import math
import tarfile
from pathlib import Path
from random import Random

import msgspec

from traces.draw import Lengths

SEED, CLIENTS, WINDOWS = 1, 8, 12
WINDOW_S = 600
RATE = 2.0
"""Requests a second of all clients together."""
STEEPNESS = 1.2
"""The load of the client of rank r is proportional to r to the minus this."""
BURSTINESS = Lengths(90, 103, 420, 500, 700, 1000)
"""Coefficients of variation of the gaps, in hundredths."""
MEAN_IN, MEAN_OUT, SIGMA = 1270, 1530, 0.8
VALUES = 40


def write(path: Path) -> None:
    random = Random(SEED)
    weights = [(rank + 1) ** -STEEPNESS for rank in range(CLIENTS)]
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for client, weight in enumerate(weights):
            rate = RATE * weight / sum(weights)
            _add(archive, f"data/sample/chunk-{client}-trace.csv", _trace(random, rate))
            _add(archive, f"data/sample/chunk-{client}-dataset.json", _dataset(random))
    path.write_bytes(gzip.compress(data.getvalue(), mtime=0))


def _trace(random: Random, rate: float) -> bytes:
    lines = []
    for window in range(WINDOWS):
        now = rate * random.lognormvariate(0.0, 0.3)
        cv = BURSTINESS(random) / 100
        shape = cv**-2
        cells = (window * WINDOW_S, f"{now:.5f}", f"{cv:.3f}", "Gamma", f"{shape:.5f}", 1 / now)
        lines.append(",".join(map(str, cells)))
    return "\n".join(lines).encode()


def _dataset(random: Random) -> bytes:
    spread = math.exp(SIGMA**2 / 2)
    maps = {
        "input_tokens": _map(random, MEAN_IN / spread),
        "output_tokens": _map(random, MEAN_OUT / spread),
        "reason_ratio": "{}",
    }
    return msgspec.json.encode({"0": maps})


def _map(random: Random, median: float) -> str:
    """The text of a map from length to probability."""
    values = sorted(
        {1 + round(random.lognormvariate(math.log(median), SIGMA)) for _ in range(VALUES)}
    )
    return str({value: round(1 / len(values), 6) for value in values})


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))

"""The name of what computes: ranks of one name take the same time for the same step."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path


def hardware_class(backend: str, params: Mapping[str, object]) -> str:
    """Of a rank of this process: processor, cores, threads of its pools, backend and what that was
    given (a simulated one computes as fast as it is told)."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    parts = (processor(), f"{os.cpu_count()} cores", f"{threads} threads", backend)
    return "; ".join((*parts, json.dumps(dict(params), sort_keys=True, default=str)))


def processor() -> str:
    """The model name as the kernel gives it, else the machine's architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())

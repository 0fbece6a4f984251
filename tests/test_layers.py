"""Imports point one way: io, backends and policies import core; core imports only core; io and
backends do not import each other; entry points join them. core takes no asyncio, torch, socket,
clock or log."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"core", "policies", "backends", "io"}
MAY_IMPORT = {
    "core": {"core"},
    "policies": {"core", "policies"},
    "backends": {"core", "backends"},
    "io": {"core", "io"},
}
CORE_FORBIDS = {
    "asyncio",
    "torch",
    "socket",
    "time",
    "logging",
    "structlog",
    "threading",
    "aiohttp",
}
CONTROL_FORBIDS = {"torch", "transformers"}


def imports(path: Path) -> set[str]:
    """Absolute module names a file imports anywhere, function bodies included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(room: str) -> list[Path]:
    return sorted((ROOT / "rtp" / room).rglob("*.py"))


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_import_only_what_lies_below_them(room: str):
    for path in files(room):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "rtp" and len(parts) > 1 and parts[1] in ROOMS:
                assert parts[1] in MAY_IMPORT[room], f"{path.relative_to(ROOT)} imports {name}"


def test_core_knows_no_clock_no_socket_no_torch():
    for path in files("core"):
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & CORE_FORBIDS, f"{path.relative_to(ROOT)}: {tops & CORE_FORBIDS}"


def test_torch_is_imported_in_backends_only():
    for room in ROOMS - {"backends"}:
        for path in files(room):
            tops = {name.split(".")[0] for name in imports(path)}
            assert not tops & CONTROL_FORBIDS, f"{path.relative_to(ROOT)}: {tops & CONTROL_FORBIDS}"


def test_no_pickle_no_torch_load_anywhere():
    for path in sorted((ROOT / "rtp").rglob("*.py")):
        text = path.read_text()
        assert "torch.load" not in text, path
        assert not {"pickle", "marshal", "shelve"} & {n.split(".")[0] for n in imports(path)}, path


def test_every_file_opens_with_its_job():
    for path in sorted((ROOT / "rtp").rglob("*.py")):
        text = path.read_text()
        if text.strip():
            assert ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} has no docstring"


@pytest.mark.parametrize("entry", ["rtp.worker", "rtp.frontend"])
def test_only_the_master_takes_the_compiler_into_its_memory(entry: str):
    program = f"import sys, {entry}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

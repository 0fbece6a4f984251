"""Kernels: compiled once for the types named, and as they stand where nothing is compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import numba
import numpy as np
import pytest

from rtp.core.kernels import kernel


def total(column: np.ndarray, scale: float) -> float:
    found = 0.0
    for i in range(column.shape[0]):
        found += column[i] * scale
    return found


SIGNATURE = "f8(Array(f8, 1, 'C', readonly=True), f8)"


def test_a_kernel_is_compiled_before_it_is_called_and_takes_read_only_columns():
    made = kernel(SIGNATURE)(total)
    assert len(made.signatures) == 1
    column = np.arange(4.0)
    assert made(column, 2.0) == 12.0
    column.setflags(write=False)
    assert made(column, 2.0) == 12.0
    assert len(made.signatures) == 1
    with pytest.raises(TypeError):
        made(np.arange(4), 2.0)  # never compiled anew for other types


def test_a_kernel_works_where_no_code_can_be_kept(monkeypatch):
    njit, tried = numba.njit, []

    def nowhere(signature: str, cache: bool, **options: object):
        tried.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(signature, cache=False, **options)

    monkeypatch.setattr(numba, "njit", nowhere)
    assert kernel(SIGNATURE)(total)(np.ones(3), 1.0) == 3.0
    assert tried == [True, False]


def test_a_kernel_runs_uncompiled():
    program = (
        "import numpy as np\n"
        "from tests.core.test_kernels import SIGNATURE, kernel, total\n"
        "made = kernel(SIGNATURE)(total)\n"
        "assert made is total\n"
        "assert made(np.ones(3), 2.0) == 6.0\n"
    )
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_kept_code_is_not_used_once_a_constant_it_reads_has_changed(tmp_path):
    """What is kept knows its own module's time only."""
    (tmp_path / "far.py").write_text("SCALE = 2.0\n")
    (tmp_path / "near.py").write_text(
        "from far import SCALE\n"
        "from rtp.core.kernels import kernel\n"
        "@kernel('f8(f8)')\n"
        "def inner(x):\n    return x * SCALE\n"
    )
    (tmp_path / "caller.py").write_text(
        "from near import inner\n"
        "from rtp.core.kernels import kernel\n"
        "@kernel('f8(f8)')\n"
        "def outer(x):\n    return inner(x) + 1.0\n"
        "print(outer(10.0))\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}

    def run() -> float:
        command = [sys.executable, "-c", "import caller"]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return float(done.stdout)

    assert run() == 21.0
    assert run() == 21.0
    (tmp_path / "far.py").write_text("SCALE = 3.00\n")
    assert run() == 31.0

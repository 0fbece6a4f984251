"""Loops over arrays, compiled to machine code: what a decision costs per rank or per block.

A kernel is an ordinary function of numbers and numpy arrays with its types named, so that it is
compiled when its module is imported and never while somebody waits. The machine code is kept beside
the module (or in the user's cache, where that cannot be written) and taken from there the next
time: as long as neither the module, nor a constant the kernel reads, nor a kernel it calls changed.

NUMBA_DISABLE_JIT=1 runs them as they stand, with every index checked.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


def kernel(signature: str, *, makes_arrays: bool = False) -> Callable[[F], F]:
    """signature: numba's, as in "f8(f8[::1], i8)"; arrays that are only read may be read-only where
    it says `Array(f8, 1, 'C', readonly=True)`. Division by zero gives infinity or NaN, sums keep
    their order, an index is not checked.

    makes_arrays: it may. References to arrays are then counted, which costs several times what most
    kernels do: atomic operations for each array at each call, from Python and between kernels."""
    # _nrt is numba's own, so a new release of it is tried before pyproject.toml lets it in.
    options: Any = {"error_model": "numpy", "_nrt": makes_arrays}

    def compiled(function: F) -> F:
        made: Any  # numba's own object, called as the function is
        # The kept code goes by this name and its module's time, and holds what it read elsewhere.
        function.__qualname__ += f"_{_reads(function, repr(options))}"
        try:
            made = numba.njit(signature, cache=True, **options)(function)
        except RuntimeError:  # nowhere to keep the code: compile anew at each start
            made = numba.njit(signature, cache=False, **options)(function)
        found: F = made
        return found

    return compiled


def _reads(function: Callable[..., Any], options: str) -> str:
    """Digest of the constants and kernels of other modules that a function uses, and of how it is
    compiled."""
    digest = blake2b(options.encode(), digest_size=8)
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        used = getattr(value, "py_func", None)
        if used is not None:
            digest.update(f"{name}:{used.__qualname__}:{used.__code__.co_consts}".encode())
            digest.update(used.__code__.co_code)
        elif isinstance(value, int | float | tuple | np.generic):
            digest.update(f"{name}={value!r}".encode())
    return digest.hexdigest()

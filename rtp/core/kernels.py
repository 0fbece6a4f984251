"""Loops over arrays, compiled to machine code: what a decision costs per rank or per block.

A kernel is an ordinary function of numbers and numpy arrays with its types named, so that it is
compiled when its module is imported and never while somebody waits. The machine code is kept beside
the module (or in the user's cache, where that cannot be written) and taken from there the next
time. Kernels that call each other live in one module: the kept code of one does not notice that
another module has changed.

NUMBA_DISABLE_JIT=1 runs them as they stand, with every index checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def kernel(signature: str) -> Callable[[F], F]:
    """signature: numba's, as in "f8(f8[::1], i8)"; arrays that are only read may be read-only where
    it says `Array(f8, 1, 'C', readonly=True)`. Division by zero gives infinity or NaN, sums keep
    their order, an index is not checked."""

    def compiled(function: F) -> F:
        made: Any  # numba's own object, called as the function is
        try:
            made = numba.njit(signature, cache=True, error_model="numpy")(function)
        except RuntimeError:  # nowhere to keep the code: compile anew at each start
            made = numba.njit(signature, cache=False, error_model="numpy")(function)
        found: F = made
        return found

    return compiled

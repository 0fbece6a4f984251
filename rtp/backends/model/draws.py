"""Counter-based random numbers: a draw depends on what it is for, not on when or beside whom."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a draw decides. Several draws for one output token differ here."""

    TOKEN = 0


def uniforms(
    seeds: list[int], choices: list[int], indices: list[int], purpose: Purpose = Purpose.TOKEN
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, 53 bits, a pure function of (seed, choice, output index,
    purpose): each is folded in by the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    state = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in (choices, indices, [int(purpose)]):
            state = _mix(state + _STEP) ^ np.array(word, dtype=np.uint64)
        state = _mix(state + _STEP)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: UInt64) -> UInt64:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))

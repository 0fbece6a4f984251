"""A row of a request trace: when a request came, how long it was, which blocks it was made of.

Traces name blocks by number, and equal numbers mean equal whole prefixes. A block's hash here is
its number mixed with the trace's salt: numbers of one trace never meet, and two traces with
different salts share nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rtp.core.types import Hashes

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
OTHER = 0xD1B54A32D192ED03


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. block_ids: one per block of the prompt, in order; the last block may be partly
    filled."""

    arrival_s: float
    """Since the trace's first request, were nothing to wait for (open loop)."""
    num_tokens: int
    num_output: int
    block_ids: tuple[int, ...]
    session: int = -1
    """Rows of one conversation or agent have one number; -1: it is not known."""
    after: int = -1
    """Index, in the trace's rows, of the one that must have ended first (closed loop); -1: none."""
    think_s: float = 0.0
    """From that row's end to this one's arrival."""
    tenant: str = ""

    def hashes(self, block_size: int, salt: int) -> Hashes:
        """Of the whole blocks of the prompt, as the Master and the workers know them."""
        return hashes_of(self.block_ids[: self.num_tokens // block_size], salt)


def hashes_of(block_ids: tuple[int, ...], salt: int) -> Hashes:
    """128 bits a block; the low half, the Master's key, is a permutation of the 64-bit numbers."""
    ids = np.array(block_ids, dtype=np.uint64)
    out = np.empty((len(ids), 2), dtype=">u8")
    out[:, 0] = _mixed(ids + np.uint64((salt + 1) * OTHER & MASK))
    out[:, 1] = _mixed(ids + np.uint64(salt * GOLDEN & MASK))
    return out.tobytes()


def _mixed(values: np.typing.NDArray[np.uint64]) -> np.typing.NDArray[np.uint64]:
    """A bijection that spreads neighbours over all bits: the finalizer of SplitMix64 (Steele, Lea,
    Flood: Fast splittable pseudorandom number generators, 2014)."""
    z = values + np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))

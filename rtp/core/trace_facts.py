"""What a trace is like: lengths, arrivals, how its prompts share blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rtp.core.arrivals import grid_s
from rtp.core.ideal_cache import Found, found
from rtp.core.trace import TraceRow
from rtp.core.types import FloatArray, IntArray

PERCENTILES = (50, 90, 95, 99, 100)
WINDOWS_S = (1, 10, 60)
ROUND_ROBIN = (4, 8, 16, 32)
SIZES = (1_000, 2_600, 5_000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one number of all rows. percentiles: at PERCENTILES."""

    mean: float
    percentiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """What caches would find under one rule (core/ideal_cache)."""

    endless: Found
    by_size: dict[int, Found]
    """One cache, by its blocks."""
    round_robin: dict[int, Found]
    """Caches without an end, by their number."""


@dataclass(frozen=True, slots=True)
class Facts:
    num_rows: int
    seconds: float
    """From the first arrival to the last, in open loop."""
    tokens_in: Spread
    tokens_out: Spread
    gap_cv: float
    """Standard deviation over mean of the gaps between arrivals; NaN below two rows."""
    peaks: dict[int, float]
    """By window in s: requests of the busiest over the mean, both counted in whole windows."""
    grid_s: float
    num_sessions: int
    num_waiting: int
    """Rows that wait for another's end."""
    num_tenants: int
    num_blocks: int
    """Different ones."""
    used_once: float
    """Share of these."""
    engine: Shares
    partial: Shares


def facts(
    rows: Sequence[TraceRow],
    block_size: int,
    sizes: Sequence[int] = SIZES,
    round_robin: Sequence[int] = ROUND_ROBIN,
) -> Facts:
    """rows: at least one, by arrival."""
    times = np.array([row.arrival_s for row in rows])
    uses = Counter(block for row in rows for block in row.block_ids)
    return Facts(
        num_rows=len(rows),
        seconds=float(times[-1] - times[0]),
        tokens_in=_spread([row.num_tokens for row in rows]),
        tokens_out=_spread([row.num_output for row in rows]),
        gap_cv=_gap_cv(times),
        peaks={window: _peak(times, window) for window in WINDOWS_S},
        grid_s=grid_s(rows),
        num_sessions=len({row.session for row in rows} - {-1}),
        num_waiting=sum(row.after >= 0 for row in rows),
        num_tenants=len({row.tenant for row in rows} - {""}),
        num_blocks=len(uses),
        used_once=sum(count == 1 for count in uses.values()) / max(1, len(uses)),
        engine=_shares(rows, block_size, False, sizes, round_robin),
        partial=_shares(rows, block_size, True, sizes, round_robin),
    )


def _shares(
    rows: Sequence[TraceRow],
    block_size: int,
    partial: bool,
    sizes: Sequence[int],
    round_robin: Sequence[int],
) -> Shares:
    """Where an endless cache finds nothing, others are not asked."""
    endless = found(rows, block_size, partial=partial)
    if not endless.found_blocks:
        return Shares(endless, {}, {})
    return Shares(
        endless,
        {n: found(rows, block_size, partial=partial, num_blocks=n) for n in sizes},
        {n: found(rows, block_size, partial=partial, caches=n) for n in round_robin},
    )


def _spread(values: Sequence[int]) -> Spread:
    numbers = np.array(values, dtype=np.float64)
    return Spread(float(numbers.mean()), tuple(np.percentile(numbers, PERCENTILES).tolist()))


def _gap_cv(times: FloatArray) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else float("nan")


def _peak(times: FloatArray, window_s: int) -> float:
    """Takes no memory for windows in which nothing comes."""
    windows: IntArray = (times // window_s).astype(np.int64)
    _, counts = np.unique(windows, return_counts=True)
    return float(counts.max() * (windows.max() + 1) / len(times))

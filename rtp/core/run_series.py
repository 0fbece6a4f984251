"""A replay over its time, and its distributions: what a report draws."""

from __future__ import annotations

import msgspec
import numpy as np

from rtp.core.replayed import Replayed
from rtp.core.types import FloatArray, IntArray

POINTS = 240
"""Of a curve over time."""
MOST_BINS, BIN_ROWS = 60, 20
"""Of arrivals, for percentiles over time: as many as have about so many rows each."""
CDF_POINTS = 200
FEW = 5
"""Fewer values give no percentile."""


class Curve(msgspec.Struct, frozen=True):
    """Points of a line; None interrupts it."""

    x: list[float]
    y: list[float | None]


class Series(msgspec.Struct, frozen=True):
    """Curves of one run; x is seconds since the first arrival, or seconds of a latency."""

    waiting: Curve | None
    """Requests in the Master's queue; None, as the next, where grants are not seen."""
    prefilling: Curve | None
    """Granted, without a first token yet."""
    decoding: Curve
    ttft_p50: Curve
    """By time of arrival."""
    ttft_p95: Curve
    hit_ratio: Curve
    ttft_cdf: Curve
    tpot_cdf: Curve
    e2e_cdf: Curve


def series(run: Replayed) -> Series:
    nan = np.isnan
    granted = np.where(nan(run.granted_s), run.ended_s, run.granted_s)
    first = np.where(nan(run.first_s), run.ended_s, run.first_s)
    at = np.linspace(0.0, max(run.end_s, 1e-9), POINTS)
    bins = min(MOST_BINS, max(1, len(run.ok) // BIN_ROWS))
    edges = np.linspace(0.0, max(float(run.arrival_s.max(initial=0.0)), 1e-9), bins + 1)
    bin_of = np.searchsorted(edges, run.arrival_s, side="right").astype(np.int64) - 1
    bin_of = np.clip(bin_of, 0, bins - 1)
    middle = (edges[:-1] + edges[1:]) / 2
    prompt = np.bincount(bin_of, run.prompt_tokens, minlength=bins)
    cached = np.bincount(bin_of, run.cached_tokens, minlength=bins)
    hits = [float(c / p) if p else None for c, p in zip(cached, prompt, strict=True)]
    return Series(
        waiting=_between(run.arrival_s, granted, at) if run.grants_seen else None,
        prefilling=_between(granted, first, at) if run.grants_seen else None,
        decoding=_between(first, run.ended_s, at),
        ttft_p50=_over_time(run.ttft_s, bin_of, middle, 50),
        ttft_p95=_over_time(run.ttft_s, bin_of, middle, 95),
        hit_ratio=Curve(_rounded(middle), hits),
        ttft_cdf=_cdf(run.ttft_s),
        tpot_cdf=_cdf(run.tpot_s),
        e2e_cdf=_cdf(np.where(run.ok, run.ended_s - run.arrival_s, np.nan)),
    )


def _between(begun: FloatArray, ended: FloatArray, at: FloatArray) -> Curve:
    """How many have begun and not ended, at each time."""
    came = np.searchsorted(np.sort(begun), at, side="right")
    left = np.searchsorted(np.sort(ended), at, side="right")
    return Curve(_rounded(at), [float(v) for v in came - left])


def _over_time(values: FloatArray, bin_of: IntArray, middle: FloatArray, percent: int) -> Curve:
    found: list[float | None] = []
    for number in range(len(middle)):
        here = values[(bin_of == number) & ~np.isnan(values)]
        found.append(float(np.percentile(here, percent)) if len(here) >= FEW else None)
    return Curve(_rounded(middle), found)


def _cdf(values: FloatArray) -> Curve:
    """Against all requests: one that never came keeps the curve below 1. The tail is drawn as
    finely as the rest."""
    there = np.sort(values[~np.isnan(values)])
    if not len(there):
        return Curve([], [])
    half = CDF_POINTS // 2
    shares = np.concatenate([np.linspace(0, 0.9, half), 1 - np.logspace(-1, -4, half), [1.0]])
    points = np.quantile(there, shares)
    whole = len(there) / len(values)
    return Curve(_rounded(points), [float(share * whole) for share in shares])


def _rounded(values: FloatArray) -> list[float]:
    """To the microsecond: more digits tell nothing."""
    return [round(float(v), 6) for v in values]

"""`python -m rtp.replay describe`: what a trace is like, and what caches would find in it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rtp.config import Positive, option
from rtp.core.ideal_cache import Found
from rtp.core.trace_facts import PERCENTILES, ROUND_ROBIN, SIZES, Facts, Shares, Spread, facts
from rtp.io.traces import Trace
from rtp.replaying.options import TraceOptions

SHOWN_GRID_S = 1e-3


class Config(TraceOptions):
    """`python -m rtp.replay describe`: Tells what a trace is like and what caches would find."""

    sizes: tuple[Positive, ...] = option(
        SIZES, "Blocks of the caches whose hits are told, comma separated.", "cache", "BLOCKS,..."
    )
    ranks: tuple[Positive, ...] = option(
        ROUND_ROBIN, "Numbers of ranks for round robin, comma separated.", "cache", "N,..."
    )
    as_json: bool = option(False, "Print one JSON object instead of text.", "output")


def main(config: Config) -> int:
    trace = config.read()
    told = facts(trace.rows, trace.block_size, config.sizes, config.ranks)
    if config.as_json:
        print(msgspec.json.encode(_as_json(trace, told)).decode())
    else:
        print("\n".join(_text(trace, told)))
    return 0


def _text(trace: Trace, told: Facts) -> Iterator[str]:
    rate = told.num_rows / told.seconds if told.seconds else 0.0
    peaks = ", ".join(f"{ratio:.1f} in {s} s" for s, ratio in told.peaks.items())
    yield (
        f"{trace.name} ({trace.format}): {told.num_rows:,} requests in {told.seconds:,.1f} s,"
        f" {rate:.2f} a second; {len(trace.bad)} bad rows, {trace.num_blank} blank"
    )
    grid = f"on a grid of {told.grid_s:g} s" if told.grid_s >= SHOWN_GRID_S else "on no grid"
    yield f"arrivals {grid}: CV of gaps {told.gap_cv:.2f}; peak/mean {peaks}"
    if told.num_sessions:
        yield (
            f"sessions: {told.num_sessions:,}; {told.num_waiting:,} rows wait for another"
            f" (closed loop); tenants: {told.num_tenants:,}"
        )
    heads = "".join(f"{'max' if p == 100 else f'p{p}':>10}" for p in PERCENTILES)
    yield f"{'tokens':<10}{'mean':>10}{heads}"
    yield from (_lengths("in", told.tokens_in), _lengths("out", told.tokens_out))
    yield (
        f"blocks of {trace.block_size} tokens: {told.num_blocks:,} different,"
        f" {told.used_once:.1%} used once"
    )
    yield ""
    yield "share found in a cache        engine's rule   last partial block counted"
    yield f"{'':<30}{'tokens':>13}{'tokens':>17}{'blocks':>12}"
    yield from _table(told.engine, told.partial)
    yield (
        "engine's rule: whole blocks only, the last token always computed."
        " Rows in order, one after the other."
    )


def _table(engine: Shares, partial: Shares) -> Iterator[str]:
    yield _line("one cache without an end", engine.endless, partial.endless)
    for size, hit in engine.by_size.items():
        yield _line(f"LRU, {size:,} blocks", hit, partial.by_size[size])
    for number, hit in engine.round_robin.items():
        yield _line(f"round robin over {number}", hit, partial.round_robin[number])


def _line(name: str, engine: Found, partial: Found) -> str:
    shares = f"{engine.token_share:>13.2%}{partial.token_share:>17.2%}{partial.block_share:>12.2%}"
    long = f"   {engine.num_too_long} rows too long" if engine.num_too_long else ""
    return f"{name:<30}{shares}{long}"


def _lengths(name: str, spread: Spread) -> str:
    return f"{name:<10}{spread.mean:>10,.0f}" + "".join(f"{p:>10,.0f}" for p in spread.percentiles)


def _as_json(trace: Trace, told: Facts) -> dict[str, object]:
    return {
        "name": trace.name,
        "format": trace.format,
        "block_size": trace.block_size,
        "num_blank": trace.num_blank,
        "bad": [{"line": bad.line, "reason": bad.reason} for bad in trace.bad],
        "percentiles": PERCENTILES,
        "facts": told,
    }

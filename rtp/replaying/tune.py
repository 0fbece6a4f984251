"""`python -m rtp.replay tune`: a policy's weights by search, judged on rows that it never saw."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Annotated

import msgspec
from pydantic import Field

from rtp.config import Positive, option
from rtp.core import plugins
from rtp.core.arrivals import part
from rtp.core.errors import ConfigError
from rtp.core.replay_fleet import Fleet
from rtp.core.run_stats import Stats
from rtp.core.search import Point, Range, search
from rtp.core.trace import TraceRow
from rtp.replaying.cluster import ClusterOptions
from rtp.replaying.options import RunOptions, Speed, TraceOptions
from rtp.replaying.results import facts, to_json
from rtp.replaying.run import SloOptions, figures
from rtp.replaying.simulate import Job, simulate
from rtp.replaying.tables import number, percent, table

SPACES: dict[str, dict[str, str]] = {
    "predicted_ttft": {"lam": "0.25:4:ratio", "crowd": "0.05:2:ratio"},
    "rtp_score": {"alpha": "0.03:3:ratio"},
    "sglang_cache_aware": {"cache_threshold": "0:1", "balance_abs": "1:128:ratio"},
    "dynamo_kv": {"overlap_weight": "0.25:4:ratio", "decode_scale": "0:1"},
    "llmd_weighted": {"prefix": "0.25:4:ratio", "kv": "0:2"},
    "flexlb_cost": {"band": "0:0.3", "band_s": "0:0.1"},
}
"""What is searched where nothing is said: LOW:HIGH of each parameter; ratio: evenly by factors."""
FIXED: dict[str, dict[str, float]] = {"rtp_score": {"beta": 0.0, "gamma": 1.0}}
"""Only ratios of its weights matter."""
WITHOUT_WEIGHTS = "mooncake_min_ttft"
"""Beside each tuned setting: least predicted time to first token, nothing to tune; bound on
arrival, as its authors do it."""


class Config(TraceOptions, ClusterOptions, RunOptions, SloOptions):
    """`python -m rtp.replay tune`: Searches a policy's weights, and tries them on unseen rows.

    The first part of the trace trains. The value of a setting is the P95 of TTFT over that of the
    defaults, as a mean over the speeds.
    """

    policy: str = option("predicted_ttft", "Routing policy.", "search", "NAME")
    space: dict[str, str] = option(
        {}, "LOW:HIGH[:ratio] of each parameter (--set space.lam=0:4).", "search"
    )
    speeds: tuple[Speed, ...] = option(
        (), "One setting has to serve all of them; default: --speed.", "search", "FACTOR,..."
    )
    training: Annotated[float, Field(gt=0, lt=1)] = option(
        0.5, "This share of the rows trains, the rest is held out.", "search", "SHARE"
    )
    rounds: Positive = option(2, "Each looks closer around the best so far.", "search", "N")
    points: Positive = option(8, "Settings tried in a round.", "search", "N")
    also: tuple[Path, ...] = option(
        (), "Further traces, read as --trace is, to try the result on.", "search", "FILE,..."
    )
    early: bool = option(False, "Bind requests as they arrive.", "run")
    out: Path | None = option(None, "Write the figures as JSON.", "run", "FILE")


class Tried(msgspec.Struct, frozen=True):
    """A setting on some rows, at one speed."""

    on: str
    setting: str
    params: dict[str, float]
    speed: float
    stats: Stats


class Tuned(msgspec.Struct, frozen=True):
    """Everything the search found."""

    policy: str
    best: dict[str, float]
    tried: list[tuple[dict[str, float], float]]
    """Settings and their values on the training part, best first."""
    results: list[Tried]


def main(config: Config) -> int:
    trace = config.read()
    also = [(path, config.read_from(path)) for path in config.also]
    space = [_range(name, text) for name, text in _space(config).items()]
    cut = int(config.training * len(trace.rows))
    if not 0 < cut < len(trace.rows):
        raise ConfigError("the trace is too short to be parted")
    train, held_out = part(trace.rows, 0, cut), part(trace.rows, cut, len(trace.rows))
    fleet = config.fleet(trace.rows, trace.block_size)
    speeds = config.speeds or (config.speed,)
    fixed = FIXED.get(config.policy, {})
    tried = _search(config, space, train, fleet, speeds)
    best = fixed | tried[0][0]
    sets: list[tuple[str, Sequence[TraceRow], Fleet]] = [
        ("training part", train, fleet),
        ("held out", held_out, fleet),
    ]
    for path, other in also:
        sets.append((path.name, other.rows, config.fleet(other.rows, other.block_size)))
    settings: list[tuple[str, str, dict[str, float], bool]] = [
        ("tuned", config.policy, best, config.early),
        ("defaults", config.policy, {}, config.early),
        ("no weights", WITHOUT_WEIGHTS, {}, True),
    ]
    cases = []
    for (on, rows, cluster), speed in product(sets, speeds):
        for label, routing, params, early in settings:
            job = _job(config, rows, cluster, routing, params, speed)
            job = replace(job, name=f"{on} {speed:g}x, {label}", early=early)
            cases.append((on, label, job))
    runs = simulate([job for *_, job in cases], config.jobs)
    results = [
        Tried(on, label, job.params, job.speed, figures(run, config.slo, job.fleet))
        for (on, label, job), run in zip(cases, runs, strict=True)
    ]
    tuned = Tuned(config.policy, best, tried, results)
    print(show(tuned))
    if config.out is not None:
        found = {"tuned": tuned}
        config.out.write_bytes(to_json(facts("tune", config, trace) | found))
    return 0


def show(tuned: Tuned) -> str:
    """The best setting, and a table of what became of it."""
    best = ", ".join(f"{name} {value:g}" for name, value in tuned.best.items())
    rows = [
        [
            each.on,
            f"{each.speed:g}x",
            each.setting,
            number(each.stats.ttft_s.p50),
            number(each.stats.ttft_s.p95),
            number(each.stats.ttft_s.max, 1),
            percent(each.stats.slo_share),
            percent(each.stats.hit_ratio),
        ]
        for each in tuned.results
    ]
    head = ["rows", "speed", "setting", "TTFT P50 s", "P95 s", "max s", "SLO", "hits"]
    return (
        f"{tuned.policy}: {best} ({len(tuned.tried)} settings tried, best "
        f"{tuned.tried[0][1]:.3f} of the defaults' P95)\n\n{table(head, rows)}"
    )


def _search(
    config: Config,
    space: Sequence[Range],
    rows: Sequence[TraceRow],
    fleet: Fleet,
    speeds: Sequence[float],
) -> list[tuple[Point, float]]:
    fixed = FIXED.get(config.policy, {})
    defaults = _defaults(config.policy)
    start = {each.name: defaults[each.name] for each in space}
    base: list[float] = []

    def evaluate(points: list[Point]) -> list[float]:
        jobs = [
            _job(config, rows, fleet, config.policy, fixed | point, speed)
            for point in points
            for speed in speeds
        ]
        found = [figures(run, config.slo, fleet) for run in simulate(jobs, config.jobs)]
        p95 = [s.ttft_s.p95 if s.ttft_s.p95 and not s.failed else float("inf") for s in found]
        by_point = [p95[i : i + len(speeds)] for i in range(0, len(p95), len(speeds))]
        if not base:
            base.extend(by_point[0])
            if not all(map(isfinite, base)):
                raise ConfigError("under the defaults requests fail: nothing to compare with")
        return [
            sum(value / start for value, start in zip(each, base, strict=True)) / len(speeds)
            for each in by_point
        ]

    return search(
        space,
        start,
        evaluate,
        rounds=config.rounds,
        points_a_round=config.points,
        seed=config.seed,
    )


def _job(
    config: Config,
    rows: Sequence[TraceRow],
    fleet: Fleet,
    routing: str,
    params: dict[str, float],
    speed: float,
) -> Job:
    told = ", ".join(f"{name} {value:g}" for name, value in params.items())
    return replace(
        Job(name=f"{routing} {speed:g}x, {told}", rows=rows, fleet=fleet, routing=routing),
        params=params,
        early=config.early,
        speed=speed,
        decode=config.decode,
        salt=config.seed,
        seed=config.seed,
        master=config.master,
    )


def _space(config: Config) -> dict[str, str]:
    space = config.space or SPACES.get(config.policy, {})
    known = _defaults(config.policy)
    for name in space:
        if name not in known:
            raise ConfigError(f"{config.policy} has no number {name!r} to tune: {', '.join(known)}")
    if not space:
        raise ConfigError(f"say what of {config.policy} is tuned: --set space.NAME=LOW:HIGH")
    return space


def _defaults(policy: str) -> dict[str, float]:
    """Parameters of its build() that are numbers. Raises ConfigError for none such policy."""
    parameters = inspect.signature(plugins.module("routing", policy).build).parameters
    return {
        name: float(p.default)
        for name, p in parameters.items()
        if isinstance(p.default, int | float) and not isinstance(p.default, bool)
    }


def _range(name: str, text: str) -> Range:
    parts = text.split(":")
    try:
        low, high = float(parts[0]), float(parts[1])
    except (ValueError, IndexError):
        raise ConfigError(f"space.{name}={text} is not LOW:HIGH or LOW:HIGH:ratio") from None
    by_ratio = parts[2:] == ["ratio"]
    if parts[2:] not in ([], ["ratio"]) or not low < high or (by_ratio and low <= 0):
        raise ConfigError(f"space.{name}={text}: LOW under HIGH, and over 0 with ratio")
    return Range(name, low, high, by_ratio)

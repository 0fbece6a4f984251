"""`python -m rtp.replay plan`: the fewest ranks that keep a goal, and how they are best divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from rtp.config import Positive, Seconds, option
from rtp.core.errors import ConfigError
from rtp.core.replay_fleet import Fleet
from rtp.core.run_stats import Stats
from rtp.replaying import results
from rtp.replaying.cluster import ClusterOptions
from rtp.replaying.options import Policies, RunOptions, Speed, TraceOptions
from rtp.replaying.run import EARLY, SloOptions, check_params, figures, routing_of
from rtp.replaying.simulate import Job, simulate
from rtp.replaying.tables import number, percent, table

Share = Annotated[float, Field(gt=0, le=1)]
Ways = Literal["fused", "split", "both"]


class Config(TraceOptions, ClusterOptions, RunOptions, SloOptions):
    """`python -m rtp.replay plan`: Finds the fewest ranks that keep a goal, per policy and speed.

    A goal is a P95 of the first token, of the others' mean, or a share of requests within --slo-*;
    all that are given have to hold, and nothing may fail.
    """

    policy: Policies = option(
        ("predicted_ttft",),
        "Routing policies; NAME@early binds requests as they arrive.",
        "run",
        "NAME,...",
    )
    params: dict[str, dict[str, Any]] = option(
        {}, "Parameters by policy (--set params.NAME.x=y).", "run"
    )
    ttft_p95_s: Seconds | None = option(None, "Goal: P95 of the first token.", "goal")
    tpot_p95_s: Seconds | None = option(None, "Goal: P95 of the other tokens' mean.", "goal")
    share: Share | None = option(None, "Goal: requests within --slo-*.", "goal", "SHARE")
    speeds: tuple[Speed, ...] = option(
        (), "Loads to plan for; default: --speed.", "plan", "FACTOR,..."
    )
    fewest: Positive = option(1, "Do not try fewer ranks.", "plan", "RANKS")
    most: Positive = option(64, "Do not try more ranks.", "plan", "RANKS")
    ways: Ways = option(
        "fused", "How ranks are used: fused, split into prefill and decode, or both.", "plan"
    )
    out: Path | None = option(None, "Write the figures as JSON.", "run", "FILE")


@dataclass(frozen=True)
class Goal:
    """What has to hold."""

    ttft_p95_s: float | None
    tpot_p95_s: float | None
    share: float | None

    def held(self, s: Stats) -> bool:
        return not s.failed and all(
            goal is None or (value is not None and value <= goal)
            for goal, value in (
                (self.ttft_p95_s, s.ttft_s.p95),
                (self.tpot_p95_s, s.tpot_s.p95),
                (self.share and -self.share, -s.slo_share),
            )
        )


class Tried(msgspec.Struct, frozen=True):
    """A cluster under one policy at one speed. prefill, decode: workers of these roles; 0: all do
    both."""

    policy: str
    speed: float
    ranks: int
    prefill: int
    decode: int
    held: bool
    stats: Stats


class Planned(msgspec.Struct, frozen=True):
    """The smallest cluster that keeps the goal; ranks 0: none of those tried does."""

    policy: str
    speed: float
    ranks: int
    prefill: int
    decode: int


def main(config: Config) -> int:
    goal = Goal(config.ttft_p95_s, config.tpot_p95_s, config.share)
    if goal == Goal(None, None, None):
        raise ConfigError("give a goal: --ttft-p95-s, --tpot-p95-s or --share")
    if config.model_fields_set & {"workers", "prefill_workers", "decode_workers"}:
        raise ConfigError("how many workers is what plan finds, from --fewest to --most ranks")
    check_params(config.params, config.policy)
    if config.ways != "fused" and config.dp > 1:
        raise ConfigError("workers that are split have one rank each: --dp 1")
    if goal.tpot_p95_s is not None and not config.decode:
        raise ConfigError("with --decode false there is one token each, so no --tpot-p95-s")
    trace = config.read()
    fleet = config.fleet(trace.rows, trace.block_size)

    def run(cases: list[tuple[str, float, int, int, int]]) -> list[Tried]:
        jobs = [
            Job(
                name=f"{policy} {speed:g}x {shape(ranks, prefill, decode)}",
                rows=trace.rows,
                fleet=_cluster(fleet, ranks, prefill, decode),
                routing=routing_of(policy),
                params=config.params.get(routing_of(policy), {}),
                early=policy.endswith(EARLY),
                speed=speed,
                decode=config.decode,
                salt=config.seed,
                seed=config.seed,
                master=config.master,
            )
            for policy, speed, ranks, prefill, decode in cases
        ]
        found = [
            figures(done, config.slo, job.fleet)
            for job, done in zip(jobs, simulate(jobs, config.jobs), strict=True)
        ]
        return [Tried(*case, goal.held(s), s) for case, s in zip(cases, found, strict=True)]

    units = range(-(-config.fewest // config.dp), config.most // config.dp + 1)
    if not units:
        raise ConfigError(
            f"no size from --fewest {config.fewest} to --most {config.most} is a multiple of"
            f" --dp {config.dp}"
        )
    searches = [(p, s) for p in config.policy for s in config.speeds or (config.speed,)]
    tried = smallest(searches, [config.dp * n for n in units], config.ways, run)
    planned = [_best(policy, speed, tried) for policy, speed in searches]
    print(show(planned, tried))
    if config.out is not None:
        found = {"planned": planned, "tried": tried}
        config.out.write_bytes(results.to_json(results.facts("plan", config, trace) | found))
    return int(any(not each.ranks for each in planned))


def smallest(
    searches: Sequence[tuple[str, float]],
    sizes: Sequence[int],
    ways: Ways,
    run: Callable[[list[tuple[str, float, int, int, int]]], list[Tried]],
) -> list[Tried]:
    """Bisects the sizes for each (policy, speed), all of them side by side; takes it that more
    ranks never do worse. Every division of a size is tried. Returns all that was tried."""
    bounds = {search: (-1, len(sizes)) for search in searches}
    tried: list[Tried] = []
    while open_ones := [s for s, (low, high) in bounds.items() if high - low > 1]:
        middle = {s: sum(bounds[s]) // 2 for s in open_ones}
        cases = [
            (*search, sizes[middle[search]], *division)
            for search in open_ones
            for division in divisions(sizes[middle[search]], ways)
        ]
        found = run(cases)
        tried += found
        for search in open_ones:
            size = sizes[middle[search]]
            ours = [t for t in found if (t.policy, t.speed, t.ranks) == (*search, size)]
            low, high = bounds[search]
            held = any(t.held for t in ours)
            bounds[search] = (low, middle[search]) if held else (middle[search], high)
    return sorted(tried, key=lambda t: (searches.index((t.policy, t.speed)), t.ranks, t.prefill))


def divisions(ranks: int, ways: Ways) -> list[tuple[int, int]]:
    """(prefill, decode) workers; (0, 0): all do both."""
    split = [(n, ranks - n) for n in range(1, ranks)] if ways != "fused" else []
    return split if ways == "split" else [(0, 0), *split]


def shape(ranks: int, prefill: int, decode: int) -> str:
    return f"{prefill} + {decode}" if prefill else str(ranks)


def show(planned: Sequence[Planned], tried: Sequence[Tried]) -> str:
    """What is needed, and the curve of all that was tried."""
    need = [
        [
            each.policy,
            f"{each.speed:g}x",
            shape(each.ranks, each.prefill, each.decode) if each.ranks else "none of these",
        ]
        for each in planned
    ]
    curve = [
        [
            each.policy,
            f"{each.speed:g}x",
            shape(each.ranks, each.prefill, each.decode),
            number(each.stats.ttft_s.p95),
            number(each.stats.tpot_s.p95 and 1000 * each.stats.tpot_s.p95, 1),
            percent(each.stats.slo_share),
            percent(each.stats.hit_ratio),
            "yes" if each.held else "no",
        ]
        for each in tried
    ]
    head = ["policy", "speed", "ranks", "TTFT P95 s", "TPOT P95 ms", "SLO", "hits", "keeps it"]
    return f"{table(['policy', 'speed', 'ranks needed'], need)}\n\n{table(head, curve)}"


def _cluster(fleet: Fleet, ranks: int, prefill: int, decode: int) -> Fleet:
    fused = 0 if prefill else ranks // fleet.ranks
    made = replace(fleet, workers=fused, prefill_workers=prefill, decode_workers=decode)
    made.check()
    return made


def _best(policy: str, speed: float, tried: Sequence[Tried]) -> Planned:
    """Of the smallest that hold, the one with the best goodput."""
    held = [t for t in tried if (t.policy, t.speed) == (policy, speed) and t.held]
    if not held:
        return Planned(policy, speed, 0, 0, 0)
    best = min(held, key=lambda t: (t.ranks, -t.stats.goodput))
    return Planned(policy, speed, best.ranks, best.prefill, best.decode)

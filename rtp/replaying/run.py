"""`python -m rtp.replay run`: a trace under one or more policies, simulated or live."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from rtp.config import Positive, Seconds, Settings, option
from rtp.core.cost import Cost
from rtp.core.errors import ConfigError
from rtp.core.replay_fleet import Fleet
from rtp.core.replayed import Replayed
from rtp.core.run_series import series
from rtp.core.run_stats import Slo, Stats, stats
from rtp.core.trace import TraceRow
from rtp.io.traces import Trace
from rtp.replaying import page, results
from rtp.replaying.cluster import ClusterOptions
from rtp.replaying.live import LiveOptions, play
from rtp.replaying.options import Policies, RunOptions, TraceOptions, spread_by
from rtp.replaying.repeat import command
from rtp.replaying.results import PolicyResult, Result, Seeded
from rtp.replaying.simulate import Job, simulate

EARLY = "@early"
DEFAULT_POLICY = ("predicted_ttft",)
NOT_LIVE = frozenset(
    {*ClusterOptions.model_fields, "policy", "params", "master", "jobs", "slo_factor"}
)
"""Options that say nothing of a server: it has its own cluster, and no cost model here."""
ONLY_LIVE = frozenset(LiveOptions.model_fields) - {"live"}
"""Options that say nothing where no server is named."""


class SloOptions(Settings):
    """What counts as good."""

    slo_ttft_s: Seconds = option(1.0, "Goal for the first token, with slo-factor.", "goal")
    slo_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = option(
        2.0, "The goal grows by so many times the prompt's own uncached prefill.", "goal"
    )
    slo_tpot_s: Seconds | None = option(None, "Goal for the mean of the other tokens.", "goal")

    @property
    def slo(self) -> Slo:
        return Slo(self.slo_ttft_s, self.slo_factor, self.slo_tpot_s)


class Config(TraceOptions, ClusterOptions, RunOptions, SloOptions, LiveOptions):
    """`python -m rtp.replay run`: Replays a trace under policies, and compares them."""

    policy: Policies = option(
        DEFAULT_POLICY,
        "Routing policies, comma separated: names, or modules of your own; NAME@early binds"
        " requests as they arrive.",
        "run",
        "NAME,...",
    )
    params: dict[str, dict[str, Any]] = option(
        {}, "Parameters by policy (--set params.NAME.x=y).", "run"
    )
    seeds: Positive | None = option(
        None,
        "Arrival seeds: each spreads rows inside the trace's grid and is a run; default: one run,"
        " of the times as they are unless there is --spread-s.",
        "load",
        "N",
    )
    spread_s: Seconds | None = option(
        None, "Spread rows of one instant over so long; default: the trace's grid.", "load"
    )
    out: Path | None = option(None, "Write the report to OUT.html and its data to OUT.json.", "run")


def main(config: Config) -> int:
    trace = config.read()
    live = config.live is not None
    if vain := config.model_fields_set & (NOT_LIVE if live else ONLY_LIVE):
        why = "with --live URL a server has its own cluster" if live else "--live URL is missing"
        names = ", ".join(name.replace("_", "-") for name in sorted(vain))
        raise ConfigError(f"{why}; {names} would do nothing")
    check_params(config.params, config.policy)
    result = _live(config, trace) if live else _simulated(config, trace)
    print(results.table(result))
    if config.out is not None:
        write(result, config.out)
    return 0


def write(result: Result, out: Path) -> None:
    """OUT.json and OUT.html. Raises OSError."""
    out.with_name(out.name + ".json").write_bytes(results.to_json(result))
    out.with_name(out.name + ".html").write_text(page.page(result), encoding="utf-8")


def check_params(params: Mapping[str, object], policies: Sequence[str]) -> None:
    """Raises ConfigError for parameters of a policy that is not among these."""
    unknown = set(params) - {routing_of(name) for name in policies}
    if unknown:
        raise ConfigError(f"params of {', '.join(sorted(unknown))}, which no --policy names")


def routing_of(name: str) -> str:
    """NAME@early -> NAME"""
    return name.removesuffix(EARLY)


def _live(config: Config, trace: Trace) -> Result:
    """One after the other: runs beside each other would be each other's load."""
    slo = dataclasses.replace(config.slo, factor=0.0)
    runs, late_s, num_counted = [], 0.0, 0
    for seed, rows in _arrivals(config, trace.rows):
        run, sending = play(config, rows, trace.block_size, seed, config.speed, config.decode)
        runs.append((seed, run))
        late_s = max(late_s, sending.late_s)
        num_counted += sending.num_counted
    nothing = np.zeros(len(trace.rows))
    policy = PolicyResult(
        name="live",
        routing="",
        early=False,
        params={},
        runs=[Seeded(seed, stats(run, slo, nothing, nothing, 0)) for seed, run in runs],
        series=series(runs[0][1]),
        differences={},
    )
    return results.make(
        command=command("run", config),
        trace=results.trace_facts(trace),
        where={
            "server": config.live,
            "sent_late_s": round(late_s, 4),
            "answers_without_usage": num_counted,
        },
        load={"speed": config.speed, "decode": config.decode, "seeds": config.seeds},
        slo=results.describe_slo(slo),
        policies=[policy],
    )


def _simulated(config: Config, trace: Trace) -> Result:
    fleet = config.fleet(trace.rows, trace.block_size)
    arrivals = _arrivals(config, trace.rows)
    seeds = [seed for seed, _ in arrivals]
    jobs = [
        Job(
            name=name if len(seeds) == 1 else f"{name}, seed {seed}",
            rows=rows,
            fleet=fleet,
            routing=routing_of(name),
            params=config.params.get(routing_of(name), {}),
            early=name.endswith(EARLY),
            speed=config.speed,
            decode=config.decode,
            salt=seed,
            seed=seed,
            master=config.master,
        )
        for name in config.policy
        for seed, rows in arrivals
    ]
    runs = simulate(jobs, config.jobs)
    policies = []
    for number, name in enumerate(config.policy):
        ours = runs[number * len(seeds) : (number + 1) * len(seeds)]
        policies.append(
            PolicyResult(
                name=name,
                routing=routing_of(name),
                early=name.endswith(EARLY),
                params=config.params.get(routing_of(name), {}),
                runs=[
                    Seeded(seed, figures(run, config.slo, fleet))
                    for seed, run in zip(seeds, ours, strict=True)
                ],
                series=series(ours[0]),
                differences={},
            )
        )
    return results.make(
        command=command("run", config),
        trace=results.trace_facts(trace),
        where=results.cluster(config),
        load={"speed": config.speed, "decode": config.decode, "seeds": config.seeds},
        slo=results.describe_slo(config.slo),
        policies=results.compare(policies),
    )


def figures(run: Replayed, slo: Slo, fleet: Fleet) -> Stats:
    """Of a run on this cluster."""
    cost = Cost(*fleet.profile)
    new = run.new_tokens.astype(np.float64)
    alone_s = cost.prefill_s(run.prompt_tokens.astype(np.float64))
    own_s = cost.prefill_s(new, run.cached_tokens.astype(np.float64))
    prefill_ranks = fleet.ranks * (fleet.workers + fleet.prefill_workers)
    return stats(run, slo, np.asarray(alone_s), np.asarray(own_s), prefill_ranks)


def _arrivals(config: Config, rows: Sequence[TraceRow]) -> list[tuple[int, Sequence[TraceRow]]]:
    """Seed and rows of each run. Raises ConfigError where all seeds would be alike."""
    if config.seeds is None and config.spread_s is None:
        return [(config.seed, rows)]
    seeds = range(config.seed, config.seed + (config.seeds or 1))
    return [(seed, spread_by(rows, seed, config.spread_s)) for seed in seeds]

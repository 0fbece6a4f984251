"""`python -m rtp.replay ablate`: what each mechanism is worth, by switching it off alone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rtp.config import option
from rtp.core import plugins
from rtp.core.run_stats import Stats
from rtp.replaying.cluster import ClusterOptions
from rtp.replaying.options import RunOptions, TraceOptions
from rtp.replaying.results import facts, to_json
from rtp.replaying.run import SloOptions, figures
from rtp.replaying.simulate import Job, simulate
from rtp.replaying.tables import number, percent, table


@dataclass(frozen=True)
class Switch:
    """A mechanism, and how a run is made without it."""

    name: str
    off: str
    """What is done instead."""
    without: tuple[str, ...] = ()
    """Of core/master/master.MECHANISMS."""
    master: dict[str, Any] = field(default_factory=dict)  # Any: options of the Master
    params: dict[str, Any] = field(default_factory=dict)
    """Of the policy, where it has them."""
    early: bool = False


SWITCHES = (
    Switch("late binding", "bound on arrival, queued at the rank", early=True),
    Switch("order", "first come, first served", ("order",)),
    Switch("hold", "never waits for a busy rank", params={"holds": False}),
    Switch("backlog weight", "a hit weighs the same at any load", params={"crowd": 0.0}),
    Switch("grouping", "company by order, not by length", ("grouping",)),
    Switch("affinity", "chats are forgotten", master={"affinity_chats": 0}),
    Switch("progress correction", "the grant's prediction stands", ("progress",)),
    Switch("arriving blocks", "a block counts when reported", ("arriving",)),
)


class Config(TraceOptions, ClusterOptions, RunOptions, SloOptions):
    """`python -m rtp.replay ablate`: Switches each mechanism off alone, and tables the difference.

    Grouping shows where ranks step together (--dp N --lockstep), affinity where the trace has
    conversations.
    """

    policy: str = option("predicted_ttft", "Routing policy.", "run", "NAME")
    params: dict[str, Any] = option({}, "Its parameters (--set params.x=y).", "run")
    out: Path | None = option(None, "Write the figures as JSON.", "run", "FILE")


class Ablated(msgspec.Struct, frozen=True):
    """A run without one mechanism, or with all ("")."""

    without: str
    instead: str
    stats: Stats


def main(config: Config) -> int:
    trace = config.read()
    fleet = config.fleet(trace.rows, trace.block_size)
    whole = Job(
        name="all",
        rows=trace.rows,
        fleet=fleet,
        routing=config.policy,
        params=config.params,
        speed=config.speed,
        decode=config.decode,
        salt=config.seed,
        seed=config.seed,
        master=config.master,
    )
    switches = [s for s in SWITCHES if set(s.params) <= _parameters(config.policy)]
    jobs = [whole, *(_off(whole, switch) for switch in switches)]
    runs = simulate(jobs, config.jobs)
    found = [figures(run, config.slo, fleet) for run in runs]
    ablated = [Ablated("", "", found[0])]
    ablated += [Ablated(s.name, s.off, f) for s, f in zip(switches, found[1:], strict=True)]
    print(show(ablated))
    if config.out is not None:
        tried = {"ablated": ablated}
        config.out.write_bytes(to_json(facts("ablate", config, trace) | tried))
    return 0


def show(ablated: list[Ablated]) -> str:
    """A table for people."""
    base = ablated[0].stats
    rows = [
        [
            each.without and f"without {each.without}",
            number(each.stats.ttft_s.p50),
            number(each.stats.ttft_s.p95),
            _change(each.stats.ttft_s.p95, base.ttft_s.p95),
            number(each.stats.ttft_s.max, 1),
            percent(each.stats.slo_share),
            percent(each.stats.hit_ratio),
            str(each.stats.held),
            each.instead,
        ]
        for each in ablated
    ]
    rows[0][0] = "everything on"
    head = ["", "TTFT P50 s", "P95 s", "change", "max s", "SLO", "hits", "held", "instead"]
    return table(head, rows)


def _off(whole: Job, switch: Switch) -> Job:
    master = whole.master | switch.master
    if switch.without:
        master |= {"without": (*master.get("without", ()), *switch.without)}
    return replace(
        whole,
        name=f"without {switch.name}",
        params=whole.params | switch.params,
        master=master,
        early=switch.early,
    )


def _parameters(policy: str) -> set[str]:
    """What its build() takes. Raises ConfigError for a policy that there is not."""
    return set(inspect.signature(plugins.module("routing", policy).build).parameters)


def _change(value: float | None, base: float | None) -> str:
    return f"{100 * (value / base - 1):+.0f} %" if value and base else ""

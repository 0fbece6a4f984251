"""What bench.policies runs: loads with their targets, policies with their settings, clusters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench.report import ROOT
from rtp.backends.transport import sim as sim_transport
from rtp.core.replay_fleet import Fault, Fleet
from rtp.core.trace import TraceRow
from rtp.io import profiles, traces
from rtp.replaying.cluster import runner
from rtp.replaying.simulate import Job

CONVERSATION = "mooncake_conversation_trace.jsonl.gz"
SYNTHETIC = "mooncake_synthetic_trace.jsonl.gz"
AZURE_CODE, AZURE_CONV = "azure_2023_code.csv", "azure_2023_conv.csv"
PROFILE = "llama2-70b-8xa100"


@dataclass(frozen=True)
class Load:
    trace: str
    ranks: int
    speed: float
    p95_s: float
    """Targets; of the published arrivals."""
    slo: float = 0.0
    longest_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.trace.split('_')[1]} {self.ranks} ranks {self.speed:g}x"


LOADS = (
    Load(CONVERSATION, 8, 1.0, 5.0, 0.985, 35.0),
    Load(CONVERSATION, 8, 1.5, 6.1, 0.98, 45.0),
    Load(CONVERSATION, 8, 1.75, 8.4, 0.91, 80.0),
    Load(CONVERSATION, 16, 3.5, 6.7, 0.975, 55.0),
    Load(SYNTHETIC, 8, 1.5, 7.0),
)
USUAL = LOADS[1]
"""The load of tables that have one."""


@dataclass(frozen=True)
class Setting:
    """A policy with parameters. by_speed: those that its authors would tune to the load."""

    label: str
    routing: str
    params: dict[str, Any] = field(default_factory=dict)  # Any: each policy's own
    by_speed: dict[float, dict[str, Any]] = field(default_factory=dict)

    def at(self, speed: float) -> dict[str, Any]:
        return self.params | self.by_speed.get(speed, {})


def _alpha(value: float) -> dict[str, float]:
    return {"alpha": value, "beta": 0.0, "gamma": 1.0}


OURS = Setting("predicted_ttft (default)", "predicted_ttft")
PEERS = (
    Setting("round_robin", "round_robin"),
    Setting("least_loaded", "least_loaded"),
    Setting("sglang_cache_aware, defaults", "sglang_cache_aware"),
    Setting(
        "sglang_cache_aware, tuned",
        "sglang_cache_aware",
        {"cache_threshold": 0.5, "balance_abs": 32.0, "balance_rel": 1.0001},
    ),
    Setting("dynamo_kv, defaults", "dynamo_kv"),
    Setting("dynamo_kv, prefill only", "dynamo_kv", {"decode_scale": 0.0}),
    Setting("llmd_weighted, defaults", "llmd_weighted"),
    Setting("llmd_weighted, 2 and 1", "llmd_weighted", {"prefix": 2.0, "queue": 1.0, "kv": 0.0}),
    Setting("mooncake_min_ttft", "mooncake_min_ttft"),
    Setting("flexlb_cost, defaults", "flexlb_cost"),
    Setting("flexlb_cost, band 1 %", "flexlb_cost", {"band": 0.01, "band_s": 0.0}),
    Setting(
        "rtp_score, tuned by load",
        "rtp_score",
        _alpha(0.25),
        {1.0: _alpha(0.1), 1.75: _alpha(1.0), 3.5: _alpha(0.5)},
    ),
    Setting("prefix_affinity", "prefix_affinity"),
)
"""Tuned: as they did best on the conversation trace in a search of ours."""
RIVALS = tuple(
    s
    for s in PEERS
    if s.label.startswith(("dynamo_kv, p", "llmd_weighted, 2", "sglang_cache_aware, t", "mooncake"))
)
"""The ones that do best; in tables where all would be too many."""


@cache
def rows_of(trace: str) -> list[TraceRow]:
    """Raises OSError where RTP_TRACES (default ../shared/traces) does not have it."""
    folder = Path(os.environ.get("RTP_TRACES", ROOT.parent / "shared" / "traces"))
    return traces.read(folder / trace).rows


def block_size(trace: str) -> int:
    return 512 if "mooncake" in trace else 16


@cache
def prefill_fleet(trace: str, ranks: int, kv_blocks: int | None = None) -> Fleet:
    """One prompt at a time on each rank."""
    cost = profiles.read(PROFILE).cost
    rows = rows_of(trace)
    return Fleet(
        runner=runner(cost, rows, block_size(trace), kv_blocks, 1),
        profile=cost.coefficients,
        workers=ranks,
        max_batch_tokens=max(row.num_tokens for row in rows),
        max_rows=1,
    )


def job(
    load: Load,
    setting: Setting,
    early: bool = False,
    *,
    fleet: Fleet | None = None,
    rows: Sequence[TraceRow] | None = None,
    seed: int = 0,
) -> Job:
    """Prefill only."""
    return Job(
        name=f"{load.name} {setting.label}{' early' if early else ''}",
        rows=rows_of(load.trace) if rows is None else rows,
        fleet=fleet or prefill_fleet(load.trace, load.ranks),
        routing=setting.routing,
        params=setting.at(load.speed),
        early=early,
        speed=load.speed,
        decode=False,
        seed=seed,
    )


TROUBLES: dict[str, tuple[Fault, ...]] = {
    "none": (),
    "reports 200 ms late": (Fault(0.0, "late", "*", 0.2),),
    "one rank half as fast": (Fault(0.0, "slow", "w0", 2.0),),
    "one lost mid-run": (Fault(1200.0, "lost", "w0"),),
    "one lost, back after 60 s": (Fault(1200.0, "lost", "w0"), Fault(1260.0, "back", "w0")),
}


@dataclass(frozen=True)
class Whole:
    """A load with decode on."""

    trace: str
    speed: float
    workers: int
    prefill: int
    decode: int

    @property
    def name(self) -> str:
        shape = f"{self.workers} fused" if self.workers else f"{self.prefill} + {self.decode} split"
        return f"{self.trace.split('.')[0]} {self.speed:g}x, {shape}"


WHOLES = tuple(
    Whole(trace, speed, *shape)
    for trace, speed in ((CONVERSATION, 1.0), (AZURE_CODE, 4.0), (AZURE_CONV, 2.0))
    for shape in ((8, 0, 0), (0, 6, 2))
)


def whole_job(whole: Whole, setting: Setting, early: bool = False, most_rows: int = 4000) -> Job:
    """The first rows of a trace, with their outputs; real batches, chunks and KV pools."""
    profile = profiles.read(PROFILE)
    rows = rows_of(whole.trace)[:most_rows]
    size = block_size(whole.trace)
    fleet = Fleet(
        runner=runner(profile.cost, rows, size, profile.kv_tokens // size, 64),
        profile=profile.cost.coefficients,
        workers=whole.workers,
        prefill_workers=whole.prefill,
        decode_workers=whole.decode,
        transport=sim_transport.build(
            latency_s=profile.transfer_latency_s, tokens_per_s=profile.transfer_tokens_per_s
        ),
    )
    return Job(
        name=f"{whole.name} {setting.label}{' early' if early else ''}",
        rows=rows,
        fleet=fleet,
        routing=setting.routing,
        params=setting.at(whole.speed),
        early=early,
        speed=whole.speed,
    )


def in_trouble(faults: tuple[Fault, ...], speed: float, fleet: Fleet) -> Fleet:
    """Their times are those of the trace."""
    at = tuple(replace(f, at_s=f.at_s / speed) for f in faults)
    return replace(fleet, faults=at)

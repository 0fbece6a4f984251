"""rtp's default policy beside what other routers do, on the Mooncake traces. Simulated.

    python -m bench.policies [--sections targets seeds peers caches errors troubles whole]

The Master, frontend and workers that serve, in virtual time; prefill only, one prompt at a time on
each rank, Llama-2-70B on 8 x A100 (7 ms + 111 us a new token + 2.1e-9 s a new token and position
before it), caches without end, the published arrivals (a grid of 3 s). SLO: TTFT within 1 s + 2 x
the prompt's uncached prefill. Early: each request is bound as it arrives, and queues at its rank,
as the routers do it that these policies are of; late: under our Master. One setting of ours serves
all loads; peers have their defaults and, where named, what did best.

Sections: targets (the claims); seeds (rows spread inside the grid, five times); peers; caches of
2,600 and 10,000 blocks a rank; errors (steps take 20 and 40 % more or less than predicted);
troubles; whole (prompts and outputs, fused and split). A run takes some 12 s of a core, all of them
an hour.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.policy_cases import (
    LOADS,
    OURS,
    PEERS,
    RIVALS,
    TROUBLES,
    USUAL,
    WHOLES,
    Load,
    in_trouble,
    job,
    prefill_fleet,
    rows_of,
    whole_job,
)
from bench.report import Claim, finish, machine
from rtp.core.arrivals import spread
from rtp.core.cost import Cost
from rtp.core.replayed import Replayed
from rtp.core.run_stats import Slo, Stats, stats
from rtp.replaying.simulate import Job, simulate

SEEDS = range(5)
CACHES = (2600, 10_000)
ERRORS = (0.2, 0.4)
HEAD = f"{'':<58}{'P50':>7}{'P95':>8}{'P99.9':>8}{'max':>8}{'SLO':>8}{'hit':>7}"


def figures(done: Job, run: Replayed) -> Stats:
    alone_s = Cost(*done.fleet.profile).prefill_s(run.prompt_tokens.astype(np.float64))
    nothing = np.zeros(len(run.ok))
    return stats(run, Slo(), np.asarray(alone_s), nothing, done.fleet.num_ranks)


def line(label: str, s: Stats) -> str:
    t = s.ttft_s
    failed = f"  {s.failed} failed" if s.failed else ""
    return (
        f"{label:<58}{t.p50:7.2f}{t.p95:8.2f}{t.p999:8.1f}{t.max:8.1f}"
        f"{100 * s.slo_share:7.1f}%{100 * s.hit_ratio:6.1f}%{failed}"
    )


def table(title: str, jobs: Sequence[Job], cores: int) -> list[Stats]:
    """Runs them, prints a line each as `cores` of them end."""
    print(f"\n{title}\n{HEAD}", flush=True)
    found = []
    for start in range(0, len(jobs), cores):
        some = jobs[start : start + cores]
        for done, run in zip(some, simulate(some, cores), strict=True):
            found.append(figures(done, run))
            print(line(done.name, found[-1]), flush=True)
    return found


def claims_of(load: Load, s: Stats) -> list[Claim]:
    assert s.ttft_s.p95 is not None
    assert s.ttft_s.max is not None
    found = [Claim(f"P95 TTFT s, {load.name}", s.ttft_s.p95, load.p95_s, "lower")]
    if load.slo:
        found += [
            Claim(f"SLO share, {load.name}", s.slo_share, load.slo, "higher"),
            Claim(f"longest TTFT s, {load.name}", s.ttft_s.max, load.longest_s, "lower"),
        ]
    return found


def targets(cores: int) -> list[Claim]:
    found = table("Published arrivals, one setting", [job(load, OURS) for load in LOADS], cores)
    return [claim for load, s in zip(LOADS, found, strict=True) for claim in claims_of(load, s)]


def seeds(cores: int) -> list[Claim]:
    for load in LOADS[:4]:
        jobs = [
            replace(job(load, OURS, rows=spread(rows_of(load.trace), seed)), name=f"seed {seed}")
            for seed in SEEDS
        ]
        found = table(f"Arrivals spread inside the grid: {load.name}", jobs, cores)
        p95 = sorted(s.ttft_s.p95 or 0.0 for s in found)
        print(f"P95 {p95[0]:.2f} to {p95[-1]:.2f} s")
    return []


def peers(cores: int) -> list[Claim]:
    for load in LOADS:
        jobs = [job(load, s, early) for s in PEERS for early in (True, False)]
        table(f"Policies of others: {load.name}", jobs, cores)
    return []


def caches(cores: int) -> list[Claim]:
    for blocks in CACHES:
        fleet = prefill_fleet(USUAL.trace, USUAL.ranks, blocks)
        jobs = [job(USUAL, OURS, fleet=fleet)]
        jobs += [job(USUAL, s, early, fleet=fleet) for s in RIVALS for early in (True, False)]
        table(f"Caches of {blocks:,} blocks a rank", jobs, cores)
    return []


def errors(cores: int) -> list[Claim]:
    for error in ERRORS:
        fleet = replace(prefill_fleet(USUAL.trace, USUAL.ranks), service_error=error)
        jobs = [job(USUAL, OURS, fleet=fleet, seed=1)]
        jobs += [
            job(USUAL, s, early, fleet=fleet, seed=1) for s in RIVALS for early in (True, False)
        ]
        table(f"Service times {100 * error:g} % off", jobs, cores)
    return []


def troubles(cores: int) -> list[Claim]:
    fleet = prefill_fleet(USUAL.trace, USUAL.ranks)
    jobs = []
    for name, faults in TROUBLES.items():
        struck = in_trouble(faults, USUAL.speed, fleet)
        for setting, early in ((OURS, False), (RIVALS[1], True)):
            made = job(USUAL, setting, early, fleet=struck)
            how = "early" if early else "late"
            jobs.append(replace(made, name=f"{name}: {setting.label} {how}"))
    table(f"When things go wrong: {USUAL.name}", jobs, cores)
    return []


def whole(cores: int) -> list[Claim]:
    """Both goals at once: TTFT and TPOT."""
    for each in WHOLES:
        print(f"\n{each.name}\n{'':<46}{'TTFT P50':>9}{'P95':>8}{'TPOT P50':>10}{'P95 ms':>8}")
        settings = (OURS, *RIVALS[1:3])
        jobs = [whole_job(each, setting, early=setting is not OURS) for setting in settings]
        for setting, done, run in zip(settings, jobs, simulate(jobs, cores), strict=True):
            s = figures(done, run)
            first, other = s.ttft_s, s.tpot_s
            how = "early" if done.early else "late"
            print(
                f"{setting.label + ' ' + how:<46}{first.p50:9.2f}{first.p95:8.2f}"
                f"{1000 * (other.p50 or 0):10.1f}{1000 * (other.p95 or 0):8.1f}"
                f"{f'  {s.failed} failed' if s.failed else ''}",
                flush=True,
            )
    return []


SECTIONS = {
    "targets": targets,
    "seeds": seeds,
    "peers": peers,
    "caches": caches,
    "errors": errors,
    "troubles": troubles,
    "whole": whole,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description=__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once")
    options = parser.parse_args()
    try:
        for load in LOADS:
            rows_of(load.trace)
    except OSError as error:
        print(f"skipped: {error.filename} is not there; RTP_TRACES names the folder of traces")
        return 0
    print(f"simulated; {machine()}")
    claims = [claim for name in options.sections for claim in SECTIONS[name](options.jobs)]
    finish("policies", claims)
    return int(not all(claim.holds for claim in claims))


if __name__ == "__main__":
    sys.exit(main())

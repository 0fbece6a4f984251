"""`python -m rtp.replay run`: a trace under one or more policies."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from rtp.config import option
from rtp.core.errors import ConfigError
from rtp.replaying.options import ClusterOptions, RunOptions, TraceOptions
from rtp.replaying.simulate import Job, simulate

EARLY = "@early"


class Config(TraceOptions, ClusterOptions, RunOptions):
    """`python -m rtp.replay run`: Replays a trace under policies, and compares them."""

    policy: tuple[str, ...] = option(
        ("predicted_ttft",),
        "Routing policies, comma separated; NAME@early binds requests as they arrive.",
        "run",
        "NAME,...",
    )
    params: dict[str, dict[str, Any]] = option(
        {}, "Parameters by policy (--set params.NAME.x=y).", "run"
    )


def main(config: Config) -> int:
    trace = config.read()
    fleet = config.fleet(trace.rows, trace.block_size)
    unknown = set(config.params) - {name.removesuffix(EARLY) for name in config.policy}
    if unknown:
        raise ConfigError(
            f"params of {', '.join(sorted(unknown))}, which is no --policy of this run"
        )
    jobs = [
        Job(
            name=name,
            rows=trace.rows,
            fleet=fleet,
            routing=name.removesuffix(EARLY),
            params=config.params.get(name.removesuffix(EARLY), {}),
            early=name.endswith(EARLY),
            speed=config.speed,
            decode=config.decode,
            salt=config.seed,
            master=config.master,
        )
        for name in config.policy
    ]
    for job, run in zip(jobs, simulate(jobs, config.jobs), strict=True):
        p50, p95 = np.nanpercentile(run.ttft_s, [50, 95])
        facts = {
            "policy": job.name,
            "ttft_p50_s": float(p50),
            "ttft_p95_s": float(p95),
            "hit": run.hit_ratio,
        }
        print(msgspec.json.encode(facts).decode())
    return 0

"""Runs of a trace in virtual time, several at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rtp.core import plugins
from rtp.core.replay import replay
from rtp.core.replay_fleet import Fleet
from rtp.core.replayed import Replayed
from rtp.core.trace import TraceRow
from rtp.replaying.parallel import run_all
from rtp.replaying.progress import Bars


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: the arguments of rtp.core.replay, the policy by its name."""

    name: str
    """For people."""
    rows: Sequence[TraceRow]
    fleet: Fleet
    routing: str
    params: dict[str, Any] = field(default_factory=dict)
    """Of the policy."""
    early: bool = False
    speed: float = 1.0
    decode: bool = True
    salt: int = 0
    seed: int = 0
    """Of what the cluster draws."""
    master: dict[str, Any] = field(default_factory=dict)
    """Options of the Master."""

    def run(self, progress: Callable[[float], None] | None = None) -> Replayed:
        """In this process. Raises ConfigError for a policy or parameters that are none."""
        return replay(
            self.rows,
            self.fleet,
            plugins.build("routing", self.routing, **self.params),
            speed=self.speed,
            decode=self.decode,
            early=self.early,
            salt=self.salt,
            seed=self.seed,
            progress=progress,
            **self.master,
        )


def simulate(jobs: Sequence[Job], cores: int) -> list[Replayed]:
    """Runs them on so many cores, shows progress on stderr, and says there of which policies the
    results are not. Results, without outcomes, in the order of the jobs."""

    def work(job: Job) -> Callable[[Callable[[float], None]], bytes]:
        return lambda progress: job.run(progress).to_bytes()

    with Bars([job.name for job in jobs]) as shown:
        results = run_all([work(job) for job in jobs], cores, shown)
    runs = [Replayed.from_bytes(result) for result in results]
    for job, run in zip(jobs, runs, strict=True):
        for fault in job.fleet.faults:
            if fault.at_s > run.end_s:
                print(
                    f"{job.name}: was over at {run.end_s:.1f} s, before {fault.what} could strike"
                    f" {fault.which} at {fault.at_s:g} s",
                    file=sys.stderr,
                )
        if run.num_fallbacks:
            print(
                f"{job.name}: the policy failed in {run.num_fallbacks} decisions, which the Master"
                f" took by least predicted wait; at last it {run.last_fallback}",
                file=sys.stderr,
            )
    return runs

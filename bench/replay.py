"""What a replay costs: python -m bench.replay

An hour of Mooncake's conversation trace in virtual time, each run in a process of its own: seconds
of one core, and its largest memory. Prefill only on 8 ranks under every policy; with decode on 8
ranks; prefill only on 64 ranks, 8 times as fast.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

from bench.conversation import find_trace
from bench.report import ROOT, Claim, finish, machine
from rtp.core import plugins
from rtp.io import traces
from rtp.replaying.cluster import ClusterOptions
from rtp.replaying.simulate import Job

DEFAULT = "predicted_ttft"
MOST_GB = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """A run, and the seconds it may take."""

    name: str
    target_s: float
    workers: int = 8
    speed: float = 1.0
    decode: bool = False


PREFILL = Case("prefill only, 8 ranks", 30.0)
DECODE = Case("with decode, 8 ranks", 150.0, decode=True)
WIDE = Case("prefill only, 64 ranks at speed 8", 180.0, workers=64, speed=8.0)
CASES = {case.name: case for case in (PREFILL, DECODE, WIDE)}


def run(case: Case, policy: str, rows: int | None) -> dict[str, float]:
    """In this process: CPU seconds of the run, without reading the trace, and facts of it."""
    trace = traces.read(find_trace())
    kept = trace.rows[:rows]
    fleet = ClusterOptions(workers=case.workers).fleet(kept, trace.block_size)
    job = Job(
        name=case.name,
        rows=kept,
        fleet=fleet,
        routing=policy,
        speed=case.speed,
        decode=case.decode,
    )
    before = time.process_time()
    done = job.run()
    return {
        "cpu_s": time.process_time() - before,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "simulated_s": done.end_s,
        "ended": float(done.ok.sum()),
    }


def apart(case: Case, policy: str, rows: int | None) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "bench.replay", "--case", case.name, "--policy", policy]
    command += ["--rows", str(rows)] if rows else []
    out = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    found: dict[str, float] = json.loads(out)
    print(
        f"{case.name}, {policy}: {found['cpu_s']:.1f} s of a core for {found['ended']:.0f} requests"
        f" in {found['simulated_s']:.0f} simulated s, {found['memory_gb']:.2f} GB",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, help="only so many")
    parser.add_argument("--case", choices=CASES, help="one run in this process, for --policy")
    parser.add_argument("--policy", default=DEFAULT)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run(CASES[args.case], args.policy, args.rows)))
        return
    print(machine())
    prefills = [apart(PREFILL, policy, args.rows) for policy in plugins.names("routing")]
    others = [apart(case, DEFAULT, args.rows) for case in (DECODE, WIDE)]
    seconds = [max(run["cpu_s"] for run in prefills), *(run["cpu_s"] for run in others)]
    claims = [
        Claim(f"s of a core, {case.name}", taken, case.target_s, "lower")
        for case, taken in zip(CASES.values(), seconds, strict=True)
    ]
    memory = max(run["memory_gb"] for run in prefills + others)
    finish("replay", [*claims, Claim("GB, the largest run", memory, MOST_GB, "lower")])


if __name__ == "__main__":
    main()

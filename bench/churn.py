"""Ten minutes of half load while a million blocks churn in the Master's map: stalls and memory.

    python -m bench.churn [--seconds 600] [--rate 2600]

As bench.fleet, but every callback of the Master's loop is timed (bench/watched_master.py): in CPU
of its thread, which says what the Master itself does, and in wall time, which preemption and the
hypervisor lengthen as well; how late the loop's timers fire; steal time by /proc/stat; resident
memory at the start, in the middle and at the end of the window. The ranks' caches are as large as
makes the map hold a million blocks, and full before the window begins. What it does not show:
ranks that come and go (bench.flap)."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from bench.conversation import Conversation, find_trace
from bench.fleet import describe
from bench.fleet_run import Plan, measure
from bench.master_process import Observer, Usage
from bench.report import Claim, finish, machine

BLOCKS_PER_RANK = 1200
FULL_S = 60.0
"""By then the caches are full."""
EVERY_S = 30.0
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=2600.0)
    parser.add_argument("--warmup", type=float, default=FULL_S)
    parser.add_argument("--prefill", type=int, default=750, help="ranks")
    parser.add_argument("--decode", type=int, default=500, help="ranks")
    parser.add_argument("--load", type=float, default=0.6, help="of the prefill ranks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"bench.churn: {machine()}; {options.seconds:g} s after {options.warmup:g} s")
    plan = Plan(
        rate=options.rate,
        seconds=options.seconds,
        warmup_s=options.warmup,
        prefill_ranks=options.prefill,
        decode_ranks=options.decode,
        ranks_per_link=8,
        blocks_per_rank=BLOCKS_PER_RANK,
        load=options.load,
    )
    with tempfile.TemporaryDirectory() as directory:
        watch = Observer("bench.watched_master", Path(directory) / "watch.json")
        run = measure(
            plan,
            Conversation(find_trace(), options.seed),
            observer=watch,
            every_s=min(EVERY_S, options.seconds / 4),
            on_usage=show,
        )
        seen = json.loads(watch.out.read_text())
    print(describe(run))
    p50, p99, p9999, latest = seen["late_ms"]
    longest_ms = seen["longest"][0][0] * 1e3 if seen["longest"] else 0.0
    print(
        f"{seen['callbacks']} callbacks, {seen['cpu_s']:.1f} s of CPU; over 2 ms of CPU:"
        f" {seen['over_2_ms']}, over 5 ms: {seen['over_5_ms']}; the longest, ms of CPU (of wall):"
    )
    for cpu_s, wall_s, name in seen["longest"]:
        print(f"  {cpu_s * 1e3:7.2f} ({wall_s * 1e3:.2f}) {name}")
    print(
        f"lateness of a timer, ms, {seen['late_samples']} samples: P50 {p50:.2f}, P99 {p99:.2f},"
        f" P99.99 {p9999:.2f}, max {latest:.2f} (a timer waits whole milliseconds: up to 1 of these"
        " is the loop's own)"
    )
    middle = run.during[len(run.during) // 2]
    points = [usage.rss_bytes / MB for usage in (run.before, middle, run.after)]
    print("memory at the start, middle, end, MB: " + ", ".join(f"{mb:.1f}" for mb in points))
    growth = points[2] / points[1] - 1
    finish(
        "churn",
        [
            Claim("longest callback, ms of CPU", longest_ms, 5, "lower"),
            Claim("errors", run.errors, 0, "lower"),
            Claim("blocks in the map", run.overview["prefix_map"]["blocks"], 1e6, "higher"),
            Claim("memory, end over middle, %", 100 * growth, 1, "lower"),
        ],
    )


def show(usage: Usage) -> None:
    print(f"  {usage.rss_bytes / MB:.1f} MB, {usage.cpu_s:.1f} s of CPU so far", flush=True)


if __name__ == "__main__":
    main()

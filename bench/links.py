"""What links to workers cost the Master: statuses and cache changes alone, and ranks per decision.

    python -m bench.links [--seconds 10] [--rounds 3]

Links: every rank decodes, so that every Status (one per 20 ms and link) differs from the last;
every 50 ms each link sends a Delta, with 16 keys on average, half of them added, half removed, and,
in a second row, 16 keys of each of its ranks. All is applied to the map; there are no requests. %
of a core is the CPU time of the Master's process by the kernel.  Decisions: the same links, rate,
load and blocks in all, at 64 and at 1,250 ranks. Runs of a row are interleaved with those of the
others; medians are reported. What it does not show: a network, more than one Master core."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import uvloop

from bench.background import Background
from bench.conversation import Conversation, find_trace
from bench.fleet_run import FLEET_CORE, MASTER_CORE, PROFILE, Plan, measure, punctual, usable
from bench.lean_fleet import LeanFleet
from bench.lean_link import clock
from bench.master_process import MasterProcess, run_master
from bench.report import Claim, finish, machine, median, spread
from bench.ticker import every_tick

BLOCKS_PER_RANK = 1024
RATE = 1000.0
ALL_BLOCKS = 64 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    conversation = Conversation(find_trace(), options.seed)
    print(f"bench.links: {machine()}; {options.seconds:g} s a run, {options.rounds} rounds")
    rows: dict[str, Callable[[], float]] = {
        "64 ranks on 8 links, 16 keys a Delta": lambda: quiet(64, 8, 1, options),
        "64 ranks on 8 links, 16 keys a rank": lambda: quiet(64, 8, 8, options),
        "64 ranks on 64 links, 16 keys a Delta": lambda: quiet(64, 1, 1, options),
        "1,250 ranks on 157 links, 16 keys a Delta": lambda: quiet(1250, 8, 1, options),
    }
    small, large = "64 ranks on 8 links", "1,250 ranks on 8 links"
    decisions: dict[str, Callable[[], float]] = {
        small: lambda: busy(64, 8, conversation, options),
        large: lambda: busy(1250, 8, conversation, options),
    }
    found: dict[str, list[float]] = {name: [] for name in (*rows, *decisions)}
    for _ in range(options.rounds):
        for name, run in (rows | decisions).items():
            found[name].append(run())
    print(f"{'% of a core, no requests':48}median (lowest-highest)")
    for name in rows:
        print(f"{name:48}{spread(found[name])}")
    print(f"us of CPU a decision, {RATE:g} requests/s, load 60 %")
    for name in decisions:
        print(f"{name:48}{spread(found[name])}")
    first, second, *_ = rows
    ratio = median(found[large]) / median(found[small])
    finish(
        "links",
        [
            Claim(f"{second}: % of a core", median(found[second]), 15, "lower"),
            Claim(f"{first}: % of a core", median(found[first]), 15, "lower"),
            Claim("CPU per decision, 1,250 / 64 ranks", ratio, 1.5, "lower"),
        ],
    )


def quiet(ranks: int, per_link: int, changing: int, options: argparse.Namespace) -> float:
    """% of a core with no requests; of each link `changing` ranks change every 50 ms."""
    os.sched_setaffinity(0, {FLEET_CORE})
    with run_master(MASTER_CORE) as master:
        punctual()
        return uvloop.run(_quiet(master, ranks, per_link, changing, options))


async def _quiet(
    master: MasterProcess, ranks: int, per_link: int, changing: int, options: argparse.Namespace
) -> float:
    fleet = LeanFleet(
        secret=master.secret,
        prefill_ranks=ranks,
        decode_ranks=0,
        ranks_per_link=per_link,
        blocks_per_rank=BLOCKS_PER_RANK,
        profile=PROFILE,
        on_end=lambda job: None,
    )
    background = Background(fleet.links, changing, options.seed)
    await fleet.start(master.url)
    await usable(fleet, master, ranks)

    def turn(now: float) -> None:
        background.turn(now)
        fleet.tick(now)

    async def run(seconds: float) -> None:
        until = clock() + seconds
        await every_tick(turn, lambda: clock() >= until)

    await run(2.0)  # snapshots
    deltas = sum(link.num_deltas for link in fleet.links)
    statuses = sum(link.num_statuses for link in fleet.links)
    keys = background.num_keys
    before = master.usage()
    await run(options.seconds)
    after = master.usage()
    seconds = after.at - before.at
    deltas = sum(link.num_deltas for link in fleet.links) - deltas
    statuses = sum(link.num_statuses for link in fleet.links) - statuses
    share = 100 * (after.cpu_s - before.cpu_s) / seconds
    per_delta = (background.num_keys - keys) / max(deltas, 1)
    print(
        f"{ranks} ranks on {len(fleet.links)} links: {share:.1f} %; {statuses / seconds:.0f} Status"
        f" and {deltas / seconds:.0f} Delta of {per_delta:.0f} keys a second",
        flush=True,
    )
    await fleet.close()
    return share


def busy(ranks: int, links: int, conversation: Conversation, options: argparse.Namespace) -> float:
    """us of CPU a decision, links and all."""
    plan = Plan(
        rate=RATE,
        seconds=options.seconds,
        warmup_s=8.0,
        prefill_ranks=ranks,
        decode_ranks=0,
        ranks_per_link=-(-ranks // links),
        blocks_per_rank=ALL_BLOCKS // ranks,
        load=0.6,
    )
    run = measure(plan, conversation)
    print(
        f"{ranks} ranks on {links} links: {run.us_per_grant:.0f} us a decision,"
        f" {run.cpu:.0%} of a core, {run.granted_per_s:.0f}/s, ranks busy {run.busy:.0%}",
        flush=True,
    )
    return run.us_per_grant


if __name__ == "__main__":
    main()

"""The Master at the head of 1,250 simulated ranks: grants a second, and how long one takes.

    python -m bench.fleet [--seconds 60] [--rate 5200] [--load 0.6] [--overload 1.15]

A Master (`python -m rtp.master`, pinned to core 0) and, on core 1, one process with the simulated
ranks (bench/lean_fleet.py) and the generator; real sockets between them. Load: the Mooncake
conversation trace (bench/conversation.py), open loop, over the frontend protocol. Latency counts
from the intended arrival to the arrival of the Grant. Service times are scaled so that the prefill
ranks are busy for the share that --load says. Requests that the Master held on purpose, for a busy
rank with their prefix, are told apart. What it does not show: real engines, several frontends, a
network.

The reference, a Master on 20 cores in production (arXiv 2605.29639): 5.2k requests/s at P50 11,
P95 263 and P99 858 ms."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import sys
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench.conversation import Conversation, find_trace
from bench.lean_fleet import LeanFleet, Profile, every_millisecond, service_s
from bench.load import Load, Window, clock, percentiles
from bench.master_process import MasterProcess, Usage, run_master
from bench.profiled_master import report
from bench.report import Claim, finish, machine

MASTER_CORE, FLEET_CORE = 0, 1
PROFILE: Profile = (0.01, 5e-5, 1e-9, 0.02, 2e-4, 1e-7)
"""A mid-sized model on one GPU: 20,000 prompt tokens a second; scaled by the factor printed."""
BLOCKS_PER_RANK = 1024
QUEUE = ("--max-queue-requests", "1000000", "--max-queue-tokens", str(1 << 40))
DRAIN_S = 30.0
LATE_MS = 2.0
CORRECTIONS, MOST_CORRECTION = 2, 1.25
"""Of the service times during the warm-up, so that the load becomes what was asked for."""


@dataclass(slots=True)
class Run:
    """What one run measured, between the window's ends unless said otherwise."""

    window: Window
    before: Usage
    after: Usage
    busy: float
    """Share of the prefill ranks' time spent on prompts."""
    offered: float
    """Of the prefill ranks' time, what the asked prompts need."""
    fleet_cpu: float
    time_factor: float
    hit: float
    """Share of prompt tokens found in ranks' caches, over the whole run."""
    left_open: int
    lost: list[str]
    refused: int
    asked: int
    ended: int
    overview: dict[str, Any]
    frames: tuple[int, int]

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    @property
    def cpu(self) -> float:
        """The Master's share of a core."""
        return (self.after.cpu_s - self.before.cpu_s) / self.seconds

    @property
    def us_per_grant(self) -> float:
        return (self.after.cpu_s - self.before.cpu_s) / max(self.window.granted, 1) * 1e6

    @property
    def looks(self) -> float:
        """Per grant, over the whole run."""
        looks: int = self.overview["policy"]["looks"]
        granted: int = self.overview["requests"]["granted"]
        return looks / max(granted, 1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=5200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warmup", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, nargs=2, default=(750, 500), metavar="N",
                        help="prefill and decode ranks")  # fmt: skip
    parser.add_argument("--links", type=int, default=160, help="at most so many")
    parser.add_argument("--load", type=float, default=0.6, help="of the prefill ranks")
    parser.add_argument("--overload", type=float, default=1.15, help="second run; 0: none")
    parser.add_argument("--profile", action="store_true", help="sample the Master: slower")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    conversation = Conversation(find_trace(), options.seed)
    print(f"bench.fleet: {machine()}")
    print(about(conversation, options), flush=True)
    claims: list[Claim] = []
    run = measure(conversation, options, options.load, options.seconds)
    print(describe(run, options, options.load), flush=True)
    claims += full_claims(run, options)
    if options.overload:
        over = measure(conversation, options, options.overload, min(options.seconds, 30.0))
        print(describe(over, options, options.overload), flush=True)
        claims += overload_claims(over)
    finish("fleet", claims)
    sys.exit(0 if valid(run) else 1)


def about(conversation: Conversation, options: argparse.Namespace) -> str:
    natural = len(conversation.turns) / conversation.length_s
    prefill, decode = options.ranks
    return (
        f"{prefill} prefill and {decode} decode ranks on {options.links} links at most; "
        f"{options.rate:g} requests/s for {options.seconds:g} s after {options.warmup:g} s\n"
        f"trace: {len(conversation.turns)} requests, {conversation.num_blocks} blocks of 512 tokens"
        f" a loop; time compressed {options.rate / natural:.0f} times, a loop every"
        f" {len(conversation.turns) / options.rate:.2f} s; {BLOCKS_PER_RANK} blocks a rank"
    )


def measure(
    conversation: Conversation, options: argparse.Namespace, load: float, seconds: float
) -> Run:
    os.sched_setaffinity(0, {FLEET_CORE})
    samples = Path(tempfile.mkstemp(suffix=".json")[1]) if options.profile else None
    with run_master(MASTER_CORE, QUEUE, samples) as master:
        punctual()
        run = uvloop.run(_measure(master, conversation, options, load, seconds))
    if samples is not None:
        print(f"\n{report(samples)}")
        samples.unlink()
    return run


def punctual() -> None:
    """The generator goes before other processes on its core, where that is allowed; what it starts
    does not."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


async def _measure(
    master: MasterProcess,
    conversation: Conversation,
    options: argparse.Namespace,
    target: float,
    seconds: float,
) -> Run:
    prefill, decode = options.ranks
    fleet = LeanFleet(
        secret=master.secret,
        prefill_ranks=prefill,
        decode_ranks=decode,
        ranks_per_link=max(8, -(-(prefill + decode) // options.links)),
        blocks_per_rank=BLOCKS_PER_RANK,
        profile=PROFILE,
        on_end=lambda job: load.ended(job),
    )
    load = Load(fleet, master.address, master.secret)
    await fleet.start(master.url)
    await load.connect()
    await _usable(fleet, master, prefill)
    fleet.time_factor = target * prefill / options.rate / _mean_service_s(conversation)
    gc.collect()
    gc.freeze()
    gc.disable()
    window = load.begin(
        conversation.arrivals(options.rate), options.warmup, options.warmup + seconds
    )
    for step in range(CORRECTIONS):
        # How much of each prompt the caches hold shows only while it runs.
        asked_s, started = fleet.started_s, fleet.num_started
        await _turns_until(load, window.since - (CORRECTIONS - step) * options.warmup / 4)
        mean_s = (fleet.started_s - asked_s) / max(fleet.num_started - started, 1)
        right = target * prefill / options.rate / mean_s
        fleet.time_factor *= min(max(right, 1 / MOST_CORRECTION), MOST_CORRECTION)
    await _turns_until(load, window.since)
    if options.profile:
        master.forget_samples()
    before, cpu, busy = master.usage(), _own_cpu_s(), _busy_s(fleet)
    asked_s, started = fleet.started_s, fleet.num_started
    await _turns_until(load, window.until)
    after, busy = master.usage(), _busy_s(fleet) - busy
    asked_s, started = fleet.started_s - asked_s, fleet.num_started - started
    fleet_cpu = (_own_cpu_s() - cpu) / (after.at - before.at)
    load.stop()
    overloaded = target > 1
    give_up = clock() + (0 if overloaded else DRAIN_S)
    await every_millisecond(load.turn, lambda: not load.num_open or clock() > give_up)
    overview = (await asyncio.to_thread(master.overview))["overview"]
    run = Run(
        window=window,
        before=before,
        after=after,
        busy=busy / (after.at - before.at) / prefill,
        offered=asked_s / max(started, 1) * options.rate / prefill,
        fleet_cpu=fleet_cpu,
        time_factor=fleet.time_factor,
        hit=fleet.cached_tokens / max(1, fleet.cached_tokens + fleet.new_tokens),
        left_open=load.num_open,
        lost=load.lost,
        refused=len(load.refused),
        asked=load.num_asked,
        ended=load.num_ended,
        overview=overview,
        frames=(
            sum(link.num_statuses for link in fleet.links),
            sum(link.num_deltas for link in fleet.links),
        ),
    )
    gc.enable()
    gc.unfreeze()
    await load.close()
    await fleet.close()
    return run


async def _usable(fleet: LeanFleet, master: MasterProcess, ranks: int) -> None:
    """Until the Master may grant to so many ranks."""
    deadline = clock() + 30
    usable = 0
    while usable < ranks and clock() < deadline:
        found = asyncio.create_task(asyncio.to_thread(master.overview))
        await every_millisecond(fleet.tick, found.done)
        models = (await found)["overview"]["models"]
        usable = sum(model["usable_ranks"] for model in models.values())


async def _turns_until(load: Load, at: float) -> None:
    await every_millisecond(load.turn, lambda: clock() >= at)


def _mean_service_s(conversation: Conversation) -> float:
    """With nothing cached: a load that is too low at first can be corrected, a queue cannot."""
    turns = conversation.turns
    return sum(service_s(PROFILE, turn.num_tokens, 0) for turn in turns) / len(turns)


def _busy_s(fleet: LeanFleet) -> float:
    return fleet.busy_s + fleet.running_s(clock())


def _own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system


# ---------------------------------------------------------------- what is printed


def describe(run: Run, options: argparse.Namespace, target: float) -> str:
    window = run.window
    statuses, deltas = run.frames
    lines = [
        f"\n-- load {target:.0%}: {options.rate:g}/s asked, {window.granted / run.seconds:.0f}/s"
        f" granted; ranks busy {run.busy:.1%} (offered {run.offered:.1%}); service times x"
        f" {run.time_factor:.4f}, {run.hit:.0%} of prompt tokens cached",
        f"{'ms from intended arrival':34}{'requests':>10}{'P50':>9}{'P95':>9}{'P99':>9}{'P99.9':>9}"
        f"{'max':>9}",
        _row("to the Grant, not held on purpose", window.at_once),
        _row("to the Grant, held for a rank", window.held),
        _row("to the Ask (generator's lateness)", window.late),
        f"{'reference: 20 cores, 5.2k/s':44}{11:9}{263:9}{858:9}",
        f"Master: {run.cpu:.1%} of a core, {run.us_per_grant:.0f} us a grant all in, waited"
        f" {run.after.queued_s - run.before.queued_s:.2f} s for the core,"
        f" {run.after.stolen_s - run.before.stolen_s:.2f} s stolen; {run.looks:.2f} looks a grant;"
        f" {run.after.rss_bytes >> 20} MB, {run.overview['prefix_map']['blocks']} blocks",
        f"fleet and generator: {run.fleet_cpu:.1%} of a core; {statuses} Status, {deltas} Delta",
        f"validity: {'' if valid(run) else 'IN'}VALID: generator's P99 at most {LATE_MS:g} ms"
        f" ({percentiles(window.late)[2]:.2f}); arrivals = completions ({run.asked} ="
        f" {run.ended}, {run.left_open} open); refused {run.refused}; connections lost"
        f" {len(run.lost)}; leases expired {run.overview['requests']['leases_expired']}",
    ]
    return "\n".join(lines)


def _row(name: str, seconds: array[float]) -> str:
    numbers = "".join(f"{value:9.2f}" for value in percentiles(seconds))
    return f"{name:34}{len(seconds):10}{numbers}"


def valid(run: Run) -> bool:
    return bool(percentiles(run.window.late)[2] <= LATE_MS) and not run.lost


def errors(run: Run) -> int:
    expired: int = run.overview["requests"]["leases_expired"]
    return run.refused + len(run.lost) + expired + abs(run.asked - run.ended)


def full_claims(run: Run, options: argparse.Namespace) -> list[Claim]:
    at_once = percentiles(run.window.at_once)
    return [
        Claim("grants/s", run.window.granted / run.seconds, 0.995 * options.rate, "higher"),
        Claim("errors", errors(run), 0, "lower"),
        Claim("P99 to Grant, not held, ms", float(at_once[2]), 10, "lower"),
        Claim("P99.9 to Grant, not held, ms", float(at_once[3]), 30, "lower"),
        Claim("generator's lateness P99, ms", float(percentiles(run.window.late)[2]), 2, "lower"),
    ]


def overload_claims(run: Run) -> list[Claim]:
    return [
        Claim("grants of what the ranks can take, overloaded", run.busy, 0.95, "higher"),
        Claim("looks a grant, overloaded", run.looks, 2, "lower"),
    ]


if __name__ == "__main__":
    main()

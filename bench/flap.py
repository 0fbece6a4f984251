"""A fifth of the ranks killed in turn for minutes, the Master too: does every request end well?

    python -m bench.flap --seconds 300

Real processes on loopback: a Master that serves no clients, a frontend apart, simulated workers.
Requests arrive at a steady rate; each must bring exactly the tokens that follow from its prompt,
and one end. Groups of a fifth of the workers are killed (SIGKILL) and started again one after
another: a group is killed when the one before serves again. In the middle the Master is killed and
started again. At the end nothing may be charged to any rank.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from bench.checked import Checked
from bench.cluster import Cluster, cluster, num_ready
from bench.report import Claim, finish, machine

STEPS = {"a": 2e-3, "b": 2e-5, "c": 0.0, "d": 3e-2, "e": 1e-4, "f": 0.0}
"""Seconds of the simulated steps: some 30 tokens a second and stream."""
GROUPS = 5
PAUSE_S = 1.0
TOKENS = (20, 100)
REBUILD_MS = 2000.0


@dataclass
class Load:
    """Requests at a steady rate until told to stop."""

    checked: Checked
    rate: float
    faults: list[str] = field(default_factory=list)
    begun: int = 0
    over: bool = False

    async def run(self) -> None:
        random = Random(1)
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            while not self.over:
                await asyncio.sleep(max(0.0, start + self.begun / self.rate - time.perf_counter()))
                tasks.create_task(self._one(self.begun, random.randint(*TOKENS)))
                self.begun += 1

    async def _one(self, number: int, tokens: int) -> None:
        fault = await self.checked.stream(number, tokens)
        if fault:
            self.faults.append(fault)
            print(f"FAULT {fault}", flush=True)


async def flap(it: Cluster, until: float, first: int) -> int:
    """Kills one group after another, from `first` on; returns which would be next."""
    size = len(it.workers) // GROUPS
    group = first
    while time.perf_counter() < until:
        for worker in it.workers[group * size : (group + 1) * size]:
            worker.kill()
            worker.start()
        # That they are gone is seen first, or they would count as ready still.
        await it.until(lambda overview: 0 < num_ready(overview) < len(it.workers))
        await it.ready()
        await asyncio.sleep(PAUSE_S)
        group = (group + 1) % GROUPS
    return group


def nothing_left(overview: Mapping[str, Any]) -> bool:  # Any: JSON
    ranks = [rank for worker in overview["workers"] for rank in worker["ranks"]]
    charged = sum(rank["charged_requests"] + rank["charged_tokens"] for rank in ranks)
    reserved = sum(rank["reserved_tokens"] + rank["running"] + rank["waiting"] for rank in ranks)
    return not (overview["bookings"] or overview["queue"]["requests"] or charged or reserved)


async def measure(options: argparse.Namespace) -> list[Claim]:
    limit = aiohttp.TCPConnector(limit=0)
    async with (
        cluster(options.workers, params=STEPS) as it,
        aiohttp.ClientSession(
            connector=limit, timeout=aiohttp.ClientTimeout(total=None)
        ) as session,
    ):
        load = Load(Checked(it.url, session), options.rate)
        start = time.perf_counter()
        running = asyncio.create_task(load.run())
        group = await flap(it, start + options.seconds / 2, 0)
        away_s, rebuild_s = await it.restart_master()
        print(f"Master away for {1e3 * away_s:.0f} ms, rebuilt in {1e3 * rebuild_s:.0f} ms more")
        await flap(it, start + options.seconds, group)
        load.over = True
        await running
        settled = time.perf_counter()
        await it.until(lambda overview: bool(overview) and nothing_left(overview))
        settled = time.perf_counter() - settled
        facts = await events(it)
        kills = sum(worker.lives for worker in it.workers) - len(it.workers)
    print(
        f"{load.begun} requests in {time.perf_counter() - start:.0f} s; {kills} kills of"
        f" {options.workers} workers; {facts.get('request.displaced', 0):.0f} attempts placed anew,"
        f" {len(load.faults)} requests failed; nothing charged {1e3 * settled:.0f} ms after"
    )
    return [
        Claim("requests that failed or brought a wrong token", len(load.faults), 0, "lower"),
        Claim("ms from a new Master's first answer to its whole view", 1e3 * rebuild_s, REBUILD_MS,
              "lower"),
        Claim("attempts placed anew", facts.get("request.displaced", 0.0), 1, "higher"),
    ]  # fmt: skip


async def events(it: Cluster) -> dict[str, float]:
    """What the frontend's core noted, by name."""
    async with it.session.get(f"{it.url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    start = 'rtp_events_total{event="'
    found = (line.removeprefix(start).split('"} ') for line in lines if line.startswith(start))
    return {name: float(value) for name, value in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=10, help="a multiple of five")
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    options = parser.parse_args()
    if options.workers < GROUPS or options.workers % GROUPS:
        parser.error("--workers is a multiple of five")
    print(machine())
    finish("flap", asyncio.run(measure(options)))


if __name__ == "__main__":
    main()

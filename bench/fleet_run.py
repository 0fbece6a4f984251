"""One run of the simulated fleet under open-loop load: Master, ranks, generator; what came out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvloop

from bench.background import Background
from bench.conversation import Conversation
from bench.lean_fleet import LeanFleet, Profile, service_s
from bench.lean_link import clock
from bench.load import Load, Window, percentiles
from bench.master_process import MasterProcess, Observer, Usage, run_master
from bench.ticker import every_tick
from rtp.core.types import Role

MASTER_CORE, FLEET_CORE = 0, 1
PROFILE: Profile = (0.01, 5e-5, 1e-9, 0.02, 2e-4, 1e-7)
"""A mid-sized model on one GPU: 20,000 prompt tokens a second; scaled by the factor printed."""
QUEUE = ("--max-queue-requests", "1000000", "--max-queue-tokens", str(1 << 40))
DRAIN_S = 30.0
LATE_MS = 2.0
CORRECTIONS, MOST_CORRECTION = 3, 1.3
"""Of the service times during the warm-up, so that the load becomes what was asked for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    rate: float
    """Requests a second."""
    seconds: float
    warmup_s: float
    prefill_ranks: int
    decode_ranks: int
    ranks_per_link: int
    blocks_per_rank: int
    load: float
    """Share of the prefill ranks' time that the prompts take."""
    whole: bool = False
    """Requests generate their whole output; else they end with their first token, and decode ranks
    have rows and changes of their own (bench/background.py)."""
    time_factor: float | None = None
    """Of the service times; None: so that `load` comes out."""


@dataclass(slots=True)
class Run:
    """What one run measured, inside its window unless said otherwise."""

    plan: Plan
    window: Window
    before: Usage
    after: Usage
    busy: float
    """Share of the prefill ranks' time spent on prompts."""
    offered: float
    """Of the prefill ranks' time, what the prompts take that were asked."""
    fleet_cpu: float
    time_factor: float
    hit: float
    """Share of prompt tokens found in ranks' caches, over the whole run."""
    asked: int
    ended: int
    refused: int
    lost: list[str]
    fences: int
    statuses: int
    deltas: int
    overview: dict[str, Any]
    """The Master's, at the end."""
    during: list[Usage] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    @property
    def cpu(self) -> float:
        """The Master's share of a core."""
        return (self.after.cpu_s - self.before.cpu_s) / self.seconds

    @property
    def granted_per_s(self) -> float:
        return self.window.granted / self.seconds

    @property
    def us_per_grant(self) -> float:
        return (self.after.cpu_s - self.before.cpu_s) / max(self.window.granted, 1) * 1e6

    @property
    def looks(self) -> float:
        """Per grant, over the whole run."""
        looks: int = self.overview["policy"]["looks"]
        granted: int = self.overview["requests"]["granted"]
        return looks / max(granted, 1)

    @property
    def leases_expired(self) -> int:
        expired: int = self.overview["requests"]["leases_expired"]
        return expired

    @property
    def gaps(self) -> int:
        """Views of caches that the Master lost."""
        return sum(worker["view"]["gaps"] for worker in self.overview["workers"])

    @property
    def errors(self) -> int:
        unended = abs(self.asked - self.ended)
        lost = self.fences + len(self.lost) + self.leases_expired + self.gaps
        return self.refused + lost + unended

    @property
    def valid(self) -> bool:
        return bool(percentiles(self.window.late)[2] <= LATE_MS) and not self.lost


def measure(
    plan: Plan,
    conversation: Conversation,
    *,
    observer: Observer | None = None,
    every_s: float | None = None,
    on_usage: Callable[[Usage], None] = lambda usage: None,
) -> Run:
    """observer: watches the Master from inside.  every_s: how often to look at its usage during the
    window; on_usage: gets what was seen."""
    os.sched_setaffinity(0, {FLEET_CORE})
    with run_master(MASTER_CORE, QUEUE, observer) as master:
        punctual()
        return uvloop.run(_measure(plan, conversation, master, every_s, on_usage))


def punctual() -> None:
    """The generator goes before other processes on its core, where that is allowed; what it starts
    does not."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


async def _measure(
    plan: Plan,
    conversation: Conversation,
    master: MasterProcess,
    every_s: float | None,
    on_usage: Callable[[Usage], None],
) -> Run:
    fleet = LeanFleet(
        secret=master.secret,
        prefill_ranks=plan.prefill_ranks,
        decode_ranks=plan.decode_ranks,
        ranks_per_link=plan.ranks_per_link,
        blocks_per_rank=plan.blocks_per_rank,
        profile=PROFILE,
        on_end=lambda job: load.ended(job),
        whole=plan.whole,
    )
    idle = [link for link in fleet.links if link.register.role is Role.DECODE and not plan.whole]
    background = Background(idle, 1, 0)
    load = Load(fleet, background, master.address, master.secret)
    await fleet.start(master.url)
    await load.connect()
    await usable(fleet, master, plan.prefill_ranks + plan.decode_ranks)
    gc.collect()
    gc.freeze()
    gc.disable()
    right_s = plan.load * plan.prefill_ranks / plan.rate
    fleet.time_factor = plan.time_factor or right_s / _mean_service_s(conversation)
    window = load.begin(
        conversation.arrivals(plan.rate), plan.warmup_s, plan.warmup_s + plan.seconds
    )
    if plan.time_factor is None:
        await _correct(load, right_s, window.since, plan.warmup_s / (CORRECTIONS + 2))
    await _turns_until(load, window.since)
    master.begin_window()
    before, cpu, busy = master.usage(), _own_cpu_s(), _busy_s(fleet)
    started_s, started = fleet.started_s, fleet.num_started
    during = []
    while clock() < window.until:
        await _turns_until(load, min(clock() + (every_s or plan.seconds), window.until))
        during.append(master.usage())
        on_usage(during[-1])
    after, busy, cpu = during.pop(), _busy_s(fleet) - busy, _own_cpu_s() - cpu
    started_s, started = fleet.started_s - started_s, fleet.num_started - started
    master.end_window()
    load.stop()
    give_up = clock() + DRAIN_S
    await every_tick(load.turn, lambda: not load.num_open or clock() > give_up)
    run = Run(
        plan=plan,
        window=window,
        before=before,
        after=after,
        busy=busy / (after.at - before.at) / plan.prefill_ranks,
        offered=started_s / max(started, 1) * plan.rate / plan.prefill_ranks,
        fleet_cpu=cpu / (after.at - before.at),
        time_factor=fleet.time_factor,
        hit=fleet.cached_tokens / max(1, fleet.cached_tokens + fleet.new_tokens),
        asked=load.num_asked,
        ended=load.num_ended,
        refused=len(load.refused),
        lost=load.lost,
        fences=fleet.num_fences,
        statuses=sum(link.num_statuses for link in fleet.links),
        deltas=sum(link.num_deltas for link in fleet.links),
        overview=(await asyncio.to_thread(master.overview))["overview"],
        during=during,
    )
    gc.enable()
    gc.unfreeze()
    await load.close()
    await fleet.close()
    return run


async def usable(fleet: LeanFleet, master: MasterProcess, ranks: int) -> None:
    """Until the Master may grant to so many ranks. Raises TimeoutError."""
    deadline = clock() + 30
    found = 0
    while found < ranks:
        if clock() > deadline:
            raise TimeoutError(f"{found} of {ranks} ranks are usable")
        looking = asyncio.create_task(asyncio.to_thread(master.overview))
        await every_tick(fleet.tick, looking.done)
        models = (await looking)["overview"]["models"]
        found = sum(model["usable_ranks"] for model in models.values())


async def _correct(load: Load, right_s: float, until: float, step_s: float) -> None:
    """How much of each prompt the caches hold shows only while it runs: the service times are
    corrected on the way, so that their mean becomes right_s. Ends a step before `until`."""
    fleet = load.fleet
    for step in range(CORRECTIONS, 0, -1):
        started_s, started = fleet.started_s, fleet.num_started
        await _turns_until(load, until - step * step_s)
        mean_s = (fleet.started_s - started_s) / max(fleet.num_started - started, 1)
        wanted = right_s / max(mean_s, 1e-9)
        fleet.time_factor *= min(max(wanted, 1 / MOST_CORRECTION), MOST_CORRECTION)


async def _turns_until(load: Load, at: float) -> None:
    await every_tick(load.turn, lambda: clock() >= at)


def _mean_service_s(conversation: Conversation) -> float:
    """With nothing cached: a load that is too low at first can be corrected, a queue cannot."""
    turns = conversation.turns
    return sum(service_s(PROFILE, turn.num_tokens, 0) for turn in turns) / len(turns)


def _busy_s(fleet: LeanFleet) -> float:
    return fleet.busy_s + fleet.running_s(clock())


def _own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system

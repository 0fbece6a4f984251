"""CPU of the Master's core per decision: a fleet in virtual time around it, no sockets.

    python -m bench.decide --ranks 64 1250 [--rate 5200] [--load 0.6] [--seconds 4] [--profile]

Ranks behind at most `--links` links report every 20 ms and send deltas every 50 ms; requests come
in bursts and share the heads of chats that are cached somewhere; every rank computes its prompts
one after the other, in the seconds its profile says, and is done with the first token. Service
times are scaled so that the fleet is loaded to `--load`. A turn takes in what came in half a
millisecond, as a busy loop does.

Times are CPU time of this thread around each handle(), and around what a round consists of. Two
fleets run in turns, so that a noisy machine troubles both. Not shown: sockets, frames, the loop.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import hashlib
import heapq
import pstats
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from bench.report import Claim, finish, machine, median
from rtp.core import plugins
from rtp.core.commands import Send
from rtp.core.events import From, LinkUp, Tick
from rtp.core.master.master import Master
from rtp.core.messages import (
    STATUS_COLUMNS,
    Ask,
    Delta,
    Finished,
    FirstToken,
    Grant,
    KeyChange,
    Now,
    Poll,
    Register,
    Snapshot,
    Status,
)
from rtp.core.types import HASH_BYTES, FrontendId, IntArray, RequestId, Role, Tier, WorkerId

BLOCK = 16
TURN_S, STATUS_S, DELTA_S = 0.0005, 0.020, 0.050
WAY_S = 0.001
"""From a Grant to its Submit at the rank."""
LENGTHS = ((32, 0.88), (128, 0.10), (512, 0.015), (2000, 0.005))
"""Hashes of a prompt, and how many of a thousand prompts have so many."""
HELD = (28 / 32, 16 / 32)
"""Half of the requests find so much of their prompt, half so much."""
BURST, BURST_SHARE = 16, 0.2
KV_TOKENS = 400_000
MAX_BLOCKS = 1_000_000
SEAMS = (("ranks", "view"), ("placements", "look"), ("ledger", "charge"))
"""Parts of a round that are timed by themselves: attribute of Master, method."""
COLUMN = {name: i for i, name in enumerate(STATUS_COLUMNS)}


@dataclass(slots=True)
class Job:
    ask: Ask
    new_tokens: int
    cached_tokens: int
    number: int
    tail: bytes


@dataclass(slots=True)
class Link:
    """One worker: its ranks, what it has told and what it has to tell."""

    register: Register
    table: IntArray  # [ranks, columns]
    free_at: list[float]
    seq: int = -1
    version: int = 1
    told: list[tuple[int, FirstToken, Finished]] = field(default_factory=list)
    """Ends that were not acknowledged; -1 where no Status has told of them yet."""
    added: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    tails: deque[tuple[int, bytes]] = field(default_factory=deque)


class Drill:
    """A Master and its fleet. run() lets virtual time pass; `cpu_ns` and `count` tell the cost."""

    def __init__(self, options: argparse.Namespace, ranks: int) -> None:
        self._random = Random(options.seed)
        self._rate = options.rate
        self.master = Master(1, plugins.build("routing", options.routing), limits=True)
        self.cpu_ns: dict[str, int] = defaultdict(int)
        self.count: dict[str, int] = defaultdict(int)
        self.longest_ns = 0
        self.waited: list[float] = []
        self.decisions = hashlib.sha256()
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0
        self._now = 1.0
        self._jobs: dict[RequestId, tuple[Ask, float, bytes]] = {}
        num_links = min(options.links, ranks)
        sizes = [ranks // num_links + (i < ranks % num_links) for i in range(num_links)]
        self.links: dict[str, Link] = {}
        self._chats: dict[int, list[bytes]] = {length: [] for length, _ in LENGTHS}
        new = sum(share * length * (1 - sum(HELD) / 2) for length, share in LENGTHS) * BLOCK
        service_s = options.load * ranks / options.rate
        self.profile = (0.2 * service_s, 0.8 * service_s / new, 0.0, 1e-3, 1e-5, 1e-9)
        self._most_tails = max(1, options.blocks // 2 // num_links)
        for index, size in enumerate(sizes):
            self._join(index, size)
        self._fill(options.blocks // 2)
        self._burst(self._now)

    # ------------------------------------------------------------ the fleet

    def _join(self, index: int, size: int) -> None:
        name = WorkerId(f"w{index:03d}")
        register = Register(
            name, 1, f"10.0.0.1:{9000 + index}", Role.FUSION, size, (KV_TOKENS,) * size, BLOCK, "m",
            65536, "card", "kv", "key", 8192, self.profile, True, "h",
        )  # fmt: skip
        table = np.zeros((size, len(STATUS_COLUMNS)), dtype="<i8")
        table[:, COLUMN["kv_free"]] = table[:, COLUMN["kv_total"]] = KV_TOKENS
        table[:, COLUMN["granted_upto"]] = -1
        link = self.links[name] = Link(register, table, [0.0] * size)
        for event in (From(name, register), LinkUp(name, 1), From(name, self._status(link))):
            self._do(self.master.handle(event, self._now))
        phase = self._random.random()
        self._at(self._now + phase * STATUS_S, lambda now: self._report(link, now))
        self._at(self._now + phase * DELTA_S, lambda now: self._changes(link, now))

    def _fill(self, blocks: int) -> None:
        """Heads of chats, each on one rank."""
        links = list(self.links.values())
        held: dict[str, dict[int, list[bytes]]] = {x.register.worker_id: {} for x in links}
        weights = [length * share for length, share in LENGTHS]
        for (length, _), weight in zip(LENGTHS, weights, strict=True):
            for _ in range(max(1, int(blocks * weight / sum(weights) / length))):
                chat = self._random.randbytes(length * HASH_BYTES)
                self._chats[length].append(chat)
                link = self._random.choice(links)
                rank = self._random.randrange(link.register.ranks)
                held[link.register.worker_id].setdefault(rank, []).append(chat)
        for link in links:
            changes = tuple(
                KeyChange(rank, Tier.DEVICE, b"".join(chats), b"")
                for rank, chats in held[link.register.worker_id].items()
            )
            self._tell(From("", Snapshot(link.register.worker_id, 1, 1, 0, 1, changes)), "")

    def _status(self, link: Link) -> Status:
        link.seq += 1
        link.told = [(link.seq if at < 0 else at, x, y) for at, x, y in link.told]
        firsts = tuple(first for _, first, _ in link.told)
        ends = tuple(end for _, _, end in link.told)
        return Status(
            link.register.worker_id, 1, 1, link.seq, link.table.tobytes(), firsts, ends
        )  # fmt: skip

    def _report(self, link: Link, now: float) -> None:
        self._tell(From("", self._status(link)), "status")
        self._at(now + STATUS_S, lambda now: self._report(link, now))

    def _changes(self, link: Link, now: float) -> None:
        self._at(now + DELTA_S, lambda now: self._changes(link, now))
        if not link.added:
            return
        removed: dict[int, list[bytes]] = defaultdict(list)
        for rank, tails in link.added.items():
            link.tails += ((rank, tail) for tail in tails)
        over = sum(len(tail) for _, tail in link.tails) // HASH_BYTES - self._most_tails
        while over > 0:
            rank, tail = link.tails.popleft()
            removed[rank].append(tail)
            over -= len(tail) // HASH_BYTES
        changes = tuple(
            KeyChange(rank, Tier.DEVICE, b"".join(link.added[rank]), b"".join(removed[rank]))
            for rank in sorted(link.added.keys() | removed.keys())
        )
        link.added.clear()
        link.version += 1
        delta = Delta(link.register.worker_id, 1, link.version - 1, link.version, changes)
        self._tell(From("", delta), "delta")

    def _submit(self, link: Link, grant: Grant) -> None:
        ask, _, tail = self._jobs.pop(grant.request_id)
        row = link.table[grant.rank]
        new = ask.num_tokens - grant.matched_tokens
        row[COLUMN["granted_upto"]] = grant.number
        row[COLUMN["running"]] += 1
        row[COLUMN["prefill_tokens"]] += new
        job = Job(ask, new, grant.matched_tokens, grant.number, tail)
        start = max(link.free_at[grant.rank], self._now)
        a, b, *_ = self.profile
        took = (a + b * new) * self._random.uniform(0.9, 1.1)
        link.free_at[grant.rank] = start + took
        waited = start - self._now
        rank = grant.rank
        self._at(start + took, lambda now: self._end(link, rank, job, took, waited))

    def _end(self, link: Link, rank: int, job: Job, took: float, waited: float) -> None:
        row = link.table[rank]
        row[COLUMN["running"]] -= 1
        row[COLUMN["prefill_tokens"]] -= job.new_tokens
        row[COLUMN["step_us"]] = int(took * 1e6)
        id = job.ask.request_id
        first = FirstToken(id, 1, job.new_tokens, job.cached_tokens, took, waited)
        end = Finished(id, 1, "done", job.ask.num_tokens, job.cached_tokens, 1)
        link.told.append((-1, first, end))
        link.added[rank].append(job.tail)
        self.count["done"] += 1
        self._tell(From("", Now(link.register.worker_id, 1, (first,), (end,))), "now")

    # ------------------------------------------------------------ the load

    def _burst(self, now: float) -> None:
        many = self._random.random() < BURST_SHARE / BURST
        for _ in range(BURST if many else 1):
            self._ask(now)
        per_burst = 1 + (BURST - 1) * BURST_SHARE / BURST
        self._at(now + self._random.expovariate(self._rate / per_burst), self._burst)

    def _ask(self, now: float) -> None:
        lengths, shares = zip(*LENGTHS, strict=True)
        length = self._random.choices(lengths, shares)[0]
        chat = self._random.choice(self._chats[length])
        head = int(length * self._random.choice(HELD))
        tail = self._random.randbytes((length - head) * HASH_BYTES)
        self._number += 1
        hashes = chat[: head * HASH_BYTES] + tail
        ask = Ask(
            FrontendId("f"), RequestId(f"r{self._number}"), 1, "m", "", f"c{chat[:4].hex()}", 0,
            hashes, length * BLOCK + 8, 1, 1, 600.0,
        )  # fmt: skip
        self._jobs[ask.request_id] = (ask, now, tail)
        self._tell(From("f", ask), "ask")

    # ------------------------------------------------------------ time

    def run(self, seconds: float) -> None:
        """Turns: everything that is due within TURN_S, then a Tick."""
        end = self._now + seconds
        while self._now < end:
            due = self.master.next_deadline()
            at = self._heap[0][0] if due is None else min(self._heap[0][0], due)
            self._now = max(self._now, at) + TURN_S
            while self._heap[0][0] <= self._now:
                when, _, act = heapq.heappop(self._heap)
                act(when)
            self._tell(Tick(), "tick")

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, act))

    def _tell(self, event: Any, what: str) -> None:  # Any: every event of a Master
        start = time.thread_time_ns()
        out = self.master.handle(event, self._now)
        took = time.thread_time_ns() - start
        self.cpu_ns[what] += took
        self.count[what] += 1
        self.longest_ns = max(self.longest_ns, took)
        self._do(out)

    def _do(self, commands: list[Any]) -> None:
        for command in commands:
            self.count[type(command).__name__] += 1
            if not isinstance(command, Send):
                continue
            message = command.message
            self.count[type(message).__name__] += 1
            if isinstance(message, Poll):
                link = self.links[command.peer]
                link.told = [x for x in link.told if x[0] < 0 or x[0] > message.acked_seq]
            elif isinstance(message, Grant):
                self.waited.append(self._now - self._jobs[message.request_id][1])
                place = f"{message.request_id} {message.worker_id} {message.rank}\n"
                self.decisions.update(place.encode())
                link = self.links[message.worker_id]
                self._at(self._now + WAY_S, lambda _, g=message, x=link: self._submit(x, g))

    @property
    def spent_ns(self) -> int:
        """All CPU inside handle()."""
        return sum(spent for what, spent in self.cpu_ns.items() if not what.startswith(" "))

    def watch_seams(self) -> None:
        """Times the parts of a round as well; each costs a third of a microsecond more."""
        for attribute, method in SEAMS:
            owner = getattr(self.master, attribute)
            setattr(owner, method, self._timer(getattr(owner, method), f"  {method}"))

    def _timer(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            result = call(*args, **kwargs)
            self.cpu_ns[what] += time.thread_time_ns() - start
            self.count[what] += 1
            return result

        return timed

    def clear(self) -> None:
        """Forgets what the warm-up cost."""
        self.cpu_ns.clear()
        self.count.clear()
        self.waited.clear()
        self.longest_ns = 0


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU of the Master's core per decision.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1250])
    parser.add_argument("--links", type=int, default=157)
    parser.add_argument("--rate", type=float, default=5200.0)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--blocks", type=int, default=MAX_BLOCKS)
    parser.add_argument("--routing", default="predicted_ttft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seams", action="store_true", help="time the parts of a round, too")
    parser.add_argument("--profile", action="store_true", help="cProfile of the core instead")
    options = parser.parse_args()
    print(machine())
    drills = {ranks: Drill(options, ranks) for ranks in options.ranks}
    gc.collect()
    gc.freeze()
    gc.disable()
    for drill in drills.values():
        drill.run(1.0)
        drill.clear()
        if options.seams:
            drill.watch_seams()
    if options.profile:
        for ranks, drill in drills.items():
            profile(ranks, drill, options.seconds)
        return
    slices: dict[int, list[float]] = {ranks: [] for ranks in drills}
    for _ in range(10):
        for ranks, drill in drills.items():
            before, grants = drill.spent_ns, len(drill.waited)
            drill.run(options.seconds / 10)
            cost = drill.spent_ns - before
            slices[ranks].append(cost / 1000 / max(1, len(drill.waited) - grants))
    for ranks, drill in drills.items():
        table(ranks, drill, options)
    whole = [median(times) for times in slices.values()]
    claims = [Claim(f"us per decision, {options.ranks[-1]} ranks", whole[-1], 120.0, "lower")]
    if len(whole) > 1:
        few, many = options.ranks[0], options.ranks[-1]
        what = f"CPU per decision, {many} over {few} ranks"
        claims.append(Claim(what, whole[-1] / whole[0], 1.5, "lower"))
    finish("decide", claims)


def table(ranks: int, drill: Drill, options: argparse.Namespace) -> None:
    grants = max(1, len(drill.waited))
    p50, p99 = np.quantile(drill.waited, (0.5, 0.99)) * 1000
    looks = drill.master.placements.num_looks / max(1, drill.master.placements.num_decisions)
    print(
        f"\n{ranks} ranks, {len(drill.links)} links, {options.rate:g}/s, load {options.load:g}: "
        f"{grants} grants, {drill.spent_ns / 1000 / grants:.1f} us each, "
        f"to Grant p50 {p50:.2f} p99 {p99:.2f} ms (virtual), "
        f"{looks:.2f} looks a grant, longest handle {drill.longest_ns / 1e6:.2f} ms, "
        f"decisions {drill.decisions.hexdigest()[:12]}"
    )
    print(f"{'':12}{'count':>10}{'us each':>10}{'us a grant':>12}")
    for what, spent in sorted(drill.cpu_ns.items()):
        each = spent / 1000 / max(1, drill.count[what])
        print(f"{what:12}{drill.count[what]:10}{each:10.1f}{spent / 1000 / grants:12.1f}")
    sends = {name: drill.count[name] for name in ("Grant", "Poll", "Note", "Refuse")}
    print("commands: " + ", ".join(f"{n} {name}" for name, n in sends.items()))


def profile(ranks: int, drill: Drill, seconds: float) -> None:
    grants = len(drill.waited)
    watch = cProfile.Profile()
    handle = drill.master.handle

    def profiled(*args: Any) -> Any:
        watch.enable()
        try:
            return handle(*args)
        finally:
            watch.disable()

    drill.master.handle = profiled  # type: ignore[method-assign]
    drill.run(seconds)
    print(f"\n{ranks} ranks, {len(drill.waited) - grants} grants")
    pstats.Stats(watch).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()

"""Generated load on a Master: pretended ranks that prefill one prompt after another and decode.

A coarse worker, enough for questions of placement: prefills run in the order of their grants at the
profile's speed, a request then decodes for its output's length, blocks are kept in
least-recently-used order. Reports are sent as the protocol says: every 20 ms after a change, keys
every 50 ms.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from rtp.core.events import From
from rtp.core.messages import Delta, Finished, FirstToken, Grant, KeyChange
from rtp.core.types import Hashes, RequestId
from tests.support.fleet import BLOCK, PROFILE, Fleet, Worker, hashes_of

DELIVERY_S = 0.002
STATUS_S = 0.02
DELTA_S = 0.05
STEP_S = 0.02
"""Of one output token."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the load."""

    at: float
    prompt: list[int]
    output: int = 20
    chat: str = ""


@dataclass(slots=True)
class Served:
    """What became of it."""

    job: Job
    worker: str = ""
    hit: int = 0
    ttft_s: float = -1.0


@dataclass(slots=True, eq=False)
class _Rank:
    worker: Worker
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    queue: deque[tuple[Grant, Served, Hashes]] = field(default_factory=deque)
    added: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    decoding: dict[RequestId, int] = field(default_factory=dict)
    busy: bool = False
    changed: bool = False
    firsts: list[FirstToken] = field(default_factory=list)
    ends: list[Finished] = field(default_factory=list)
    tokens_left: int = 0


def serve(
    jobs: Iterable[Job],
    *,
    routing: object = "predicted_ttft",
    workers: int = 8,
    cache_tokens: int = 50_000,
    **settings: object,
) -> list[Served]:
    """Runs the load to its end; every request is served. Times count from the first instant."""
    return _Load(Fleet(routing, check=False, **settings), workers, cache_tokens).run(jobs)


class _Load:
    def __init__(self, fleet: Fleet, workers: int, cache_tokens: int) -> None:
        self.fleet = fleet
        self.capacity = cache_tokens // BLOCK
        self.ranks = {}
        for i in range(workers):
            worker = fleet.add(f"w{i:02d}", kv_total=(10 * cache_tokens,), max_model_len=200_000)
            fleet.snapshot(worker)
            self.ranks[worker.id] = _Rank(worker)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.served: dict[RequestId, tuple[Served, Hashes]] = {}
        self.start = fleet.now
        self.read = len(fleet.out)

    def run(self, jobs: Iterable[Job]) -> list[Served]:
        for job in jobs:
            self.at(self.start + job.at, lambda job=job: self.ask(job))
        for rank in self.ranks.values():
            self.at(self.start, lambda rank=rank: self.report(rank))
            self.at(self.start, lambda rank=rank: self.delta(rank))
        while any(s.ttft_s < 0 for s, _ in self.served.values()) or self.asks_left():
            deadline = self.fleet.master.next_deadline()
            if deadline is not None and deadline < self.events[0][0]:
                self.fleet.now = max(self.fleet.now, deadline)
                self.fleet.tick()
            else:
                self.fleet.now, _, act = heapq.heappop(self.events)
                act()
            self.deliver()
        return [served for served, _ in self.served.values()]

    def asks_left(self) -> bool:
        return len(self.events) > 2 * len(self.ranks)

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.count), act))

    def ask(self, job: Job) -> None:
        hashes = hashes_of(job.prompt)
        request = self.fleet.ask(job.prompt, chat_id=job.chat, max_tokens=job.output)
        self.served[request] = (Served(job), hashes)

    def deliver(self) -> None:
        """New grants travel to their workers."""
        for grant in self.fleet.sent(Grant, self.fleet.out[self.read :]):
            self.at(self.fleet.now + DELIVERY_S, lambda grant=grant: self.submit(grant))
        self.read = len(self.fleet.out)

    def submit(self, grant: Grant) -> None:
        served, hashes = self.served[grant.request_id]
        rank = self.ranks[grant.worker_id]
        rank.worker.see(grant)
        rank.queue.append((grant, served, hashes))
        rank.tokens_left += len(served.job.prompt) - grant.matched_tokens
        rank.changed = True
        if not rank.busy:
            self.prefill(rank)

    def prefill(self, rank: _Rank) -> None:
        rank.busy = bool(rank.queue)
        if not rank.busy:
            return
        grant, served, hashes = rank.queue.popleft()
        keys = [hashes[i : i + 16] for i in range(0, len(hashes), 16)]
        prompt = len(served.job.prompt)
        held = next((i for i, key in enumerate(keys) if key not in rank.cache), len(keys))
        served.hit = min(held * BLOCK, (prompt - 1) // BLOCK * BLOCK)
        served.worker = grant.worker_id
        new = prompt - served.hit
        a, b, c = PROFILE[:3]
        seconds = a + b * new + c * new * (served.hit + new / 2)
        for key in keys:
            if key not in rank.cache:
                rank.added.append(key)
            rank.cache[key] = None
            rank.cache.move_to_end(key)
        while len(rank.cache) > self.capacity:
            rank.removed.append(rank.cache.popitem(last=False)[0])
        self.at(
            self.fleet.now + seconds,
            lambda: self.first_token(rank, grant, served, new, seconds),
        )

    def first_token(
        self, rank: _Rank, grant: Grant, served: Served, new: int, seconds: float
    ) -> None:
        served.ttft_s = self.fleet.now - self.start - served.job.at
        rank.tokens_left -= len(served.job.prompt) - grant.matched_tokens
        rank.firsts.append(
            FirstToken(grant.request_id, grant.attempt, new, served.hit, seconds, 0.0)
        )
        rank.decoding[grant.request_id] = len(served.job.prompt)
        end_at = self.fleet.now + STEP_S * served.job.output
        self.at(end_at, lambda: self.end(rank, grant, served))
        rank.changed = True
        self.prefill(rank)

    def end(self, rank: _Rank, grant: Grant, served: Served) -> None:
        del rank.decoding[grant.request_id]
        prompt, output = len(served.job.prompt), served.job.output
        rank.ends.append(
            Finished(grant.request_id, grant.attempt, "done", prompt, served.hit, output)
        )
        rank.changed = True

    def report(self, rank: _Rank) -> None:
        self.at(self.fleet.now + STATUS_S, lambda: self.report(rank))
        if rank.changed or int(self.fleet.now / STATUS_S) % 10 == 0:
            context = sum(rank.decoding.values())
            self.fleet.report(
                rank.worker,
                firsts=tuple(rank.firsts),
                finished=tuple(rank.ends),
                running=len(rank.decoding) + rank.busy,
                waiting=len(rank.queue),
                prefill_tokens=rank.tokens_left,
                decode_rows=len(rank.decoding),
                context_tokens=context,
                kv_free=10 * self.capacity * BLOCK - context,
            )
            rank.firsts.clear()
            rank.ends.clear()
            rank.changed = False

    def delta(self, rank: _Rank) -> None:
        self.at(self.fleet.now + DELTA_S, lambda: self.delta(rank))
        if rank.added or rank.removed:
            both = set(rank.added) & set(rank.removed)
            added = b"".join(k for k in dict.fromkeys(rank.added) if k not in both)
            removed = b"".join(k for k in dict.fromkeys(rank.removed) if k not in both)
            worker = rank.worker
            worker.version += 1
            change = KeyChange(0, 0, added, removed)
            frame = Delta(worker.id, worker.epoch, worker.version - 1, worker.version, (change,))
            self.fleet.tell(From(worker.id, frame))
            rank.added.clear()
            rank.removed.clear()


def percentile(served: Iterable[Served], q: float) -> float:
    return float(np.percentile([s.ttft_s for s in served], q))

"""A fleet of simulated workers for benchmarks of the Master: thousands of ranks in one process.

Towards the Master they are workers in every respect: they register over HTTP, are dialled, prove
the key, answer Polls with Status and Delta by the worker's own rules (core/worker/reports), send
first tokens and ends at once, and start with a snapshot. What they lack is an engine: a rank runs
one prompt after the other, each for the seconds that the profile says for the part that its cache
does not hold, keeps the prompt's blocks, least recently used ones leaving first, tails before
heads, and ends the request with its first token.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import socket
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import aiohttp
import msgspec
from aiohttp import web

from bench.conversation import BLOCK, Arrival
from rtp.core.commands import Send
from rtp.core.messages import (
    STATUS_COLUMNS,
    Fence,
    Finished,
    FirstToken,
    Grant,
    Poll,
    Register,
)
from rtp.core.ports import Capacity
from rtp.core.types import HASH_BYTES, RequestId, Role, WorkerId
from rtp.core.worker.reports import Reports, SeenGrants
from rtp.core.worker.stats import Stats
from rtp.io.codec import FrameDecoder, ToWorker
from rtp.io.connection import FrameConnection
from rtp.io.handshake import Claim, key_id
from rtp.io.registration import keep_registered
from rtp.io.upgrade import accept
from rtp.rank import byte_card
from rtp.serving import listen

MODEL = "simulated"
WIDTH = len(STATUS_COLUMNS)
COLUMN = {name: i for i, name in enumerate(STATUS_COLUMNS)}
Profile = tuple[float, float, float, float, float, float]
clock = time.monotonic


@dataclass(slots=True)
class Job:
    """A request on a rank."""

    request_id: RequestId
    attempt: int
    arrival: Arrival
    accepted_at: float
    started_at: float = 0.0
    took_s: float = 0.0
    new_tokens: int = 0
    """Until it starts: as its rank's cache stood when it came."""
    cached_tokens: int = 0


class LeanCache:
    """Segments of blocks that one rank holds; what a CacheReport wants to know of them.

    Least recently used first. A prompt's segments are touched from its tail to its head, so that no
    head leaves before its tails and what is held stays closed under prefixes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_changes = 0
        """Segments that take_changes() would tell of."""
        self._room = num_blocks * HASH_BYTES
        self._held: dict[int, bytes] = {}
        self._changes: dict[int, tuple[bool, bytes]] = {}

    def matched(self, arrival: Arrival) -> int:
        """Tokens of the longest held prefix; the last token is always computed."""
        found = 0
        for key, part in zip(arrival.keys, arrival.parts, strict=True):
            if key not in self._held:
                break
            found += len(part)
        most = (arrival.turn.num_tokens - 1) // BLOCK * BLOCK
        return min(found // HASH_BYTES * BLOCK, most)

    def use(self, arrival: Arrival) -> None:
        """Holds the whole prompt; what has not been used for longest leaves for it."""
        held = self._held
        for key, part in zip(reversed(arrival.keys), reversed(arrival.parts), strict=True):
            if held.pop(key, None) is None:
                self._room -= len(part)
                self._changed(key, part, True)
            held[key] = part
        while self._room < 0:
            key = next(iter(held))
            part = held.pop(key)
            self._room += len(part)
            self._changed(key, part, False)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes added and removed since the last call."""
        changes, self._changes = self._changes.values(), {}
        self.num_changes = 0
        added = [part for held, part in changes if held]
        return added, [part for held, part in changes if not held]

    def keys(self) -> Iterator[bytes]:
        """All hashes held."""
        return iter(self._held.values())

    def _changed(self, key: int, part: bytes, held: bool) -> None:
        if self._changes.pop(key, (held,))[0] == held:
            self._changes[key] = (held, part)
        self.num_changes = len(self._changes)


class LeanRank:
    """One rank: a queue, the prompt that runs, a cache, grant numbers."""

    __slots__ = ("cache", "job", "link", "queue", "rank", "seen", "waiting_tokens")

    def __init__(self, link: LeanLink, rank: int, num_blocks: int) -> None:
        self.link = link
        self.rank = rank
        self.cache = LeanCache(num_blocks)
        self.seen = SeenGrants()
        self.queue: deque[Job] = deque()
        self.waiting_tokens = 0
        self.job: Job | None = None


class LeanLink:
    """One worker: its ranks, what it reports of them and when."""

    def __init__(self, register: Register, blocks_per_rank: int) -> None:
        self.register = register
        self.ranks = [LeanRank(self, rank, blocks_per_rank) for rank in range(register.ranks)]
        self.connection: FrameConnection | None = None
        self.unlinked = asyncio.Event()
        self.unlinked.set()
        self.due = inf
        self.num_statuses = 0
        self._stats = Stats()
        self._term = 0
        pools: Sequence[object] = [rank.cache for rank in self.ranks]
        self._reports = Reports(register, pools, self._stats)  # type: ignore[arg-type]  # see LeanCache
        self._table = array("q", bytes(8 * WIDTH * register.ranks))
        for rank, total in enumerate(register.kv_total):
            self._table[rank * WIDTH + COLUMN["kv_free"]] = total
            self._table[rank * WIDTH + COLUMN["kv_total"]] = total

    @property
    def num_deltas(self) -> int:
        return self._stats.deltas

    @property
    def num_snapshots(self) -> int:
        return self._stats.snapshots

    def admit(self, claim: Claim) -> str:
        """Why a Master's link is refused; '' if it is not."""
        if int(claim.peer) < self._term:
            return "a lower term"
        mine = (self.register.worker_id, self.register.epoch)
        return "" if (claim.worker_id, claim.epoch) == mine else f"this is {mine}"

    def open(self, claim: Claim) -> FrameConnection:
        """A proved link."""
        self._term = int(claim.peer)
        self.connection = FrameConnection(FrameDecoder(ToWorker), self._on_message, self._closed)
        self._reports.up(self._term, clock())
        self.unlinked.clear()
        return self.connection

    def tell(self, news: FirstToken | Finished) -> None:
        """Goes out with the next flush."""
        self._reports.add(news)
        self.due = 0.0

    def flush(self, now: float) -> None:
        """Sends everything due by now."""
        for command in self._reports.flush(now, lambda: self._status(now), False):
            if isinstance(command, Send) and self.connection is not None:
                self.connection.send(command.message)
        self._arm()

    def set(self, rank: int, column: str, value: int) -> None:
        """A column of Status that flush() does not work out itself."""
        self._table[rank * WIDTH + COLUMN[column]] = value

    def _arm(self) -> None:
        due = self._reports.next_deadline() if self._reports.linked else None
        self.due = inf if due is None else due

    def _on_message(self, message: Poll | Fence) -> None:
        if isinstance(message, Fence):
            self.ranks[message.rank].seen.add(message.number)
        else:
            self._reports.polled(message)
        self._reports.changed()  # in this fleet every Status says something new
        self._arm()

    def _closed(self, reason: str) -> None:
        self.connection = None
        self._reports.down(clock())
        self.due = inf
        self.unlinked.set()

    def _status(self, now: float) -> bytes:
        self.num_statuses += 1
        table, at = self._table, 0
        for rank in self.ranks:
            job = rank.job
            left = rank.waiting_tokens
            if job is not None:
                left += int(job.new_tokens * (1.0 - min(1.0, (now - job.started_at) / job.took_s)))
            table[at] = job is not None
            table[at + 1] = len(rank.queue)
            table[at + 2] = left
            table[at + 10], table[at + 11] = rank.seen.columns()
            at += WIDTH
        return table.tobytes()


def service_s(profile: tuple[float, ...], new: int, cached: int) -> float:
    """Seconds of a prefill (design section 4)."""
    return profile[0] + new * (profile[1] + profile[2] * (cached + 0.5 * new))


class LeanFleet:
    """All links of the fleet and the HTTP servers on which they are dialled.

    on_end(job): a request ended with its first token.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        prefill_ranks: int,
        decode_ranks: int,
        ranks_per_link: int,
        blocks_per_rank: int,
        profile: Profile,
        on_end: Callable[[Job], None],
    ) -> None:
        self.time_factor = 1.0
        """Services take so many times what `profile` says. May be changed while it runs: the Master
        learns."""
        self.busy_s = 0.0
        """Seconds of all prompts that ended."""
        self.num_started = 0
        self.started_s = 0.0
        """Seconds that all prompts take that were started."""
        self.num_ended = 0
        self.num_fenced = 0
        self.new_tokens = 0
        self.cached_tokens = 0
        self._secret = secret
        self._profile = profile
        self._on_end = on_end
        self._running: list[tuple[float, int, LeanRank]] = []
        self._runners: list[web.AppRunner] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        capacity = Capacity(blocks_per_rank, BLOCK, 1 << 18, 400, (2,), "simulated")
        self._card = byte_card(MODEL, capacity)
        self._sockets: dict[WorkerId, socket.socket] = {}
        self._links: dict[WorkerId, LeanLink] = {}
        for role, total in ((Role.FUSION, prefill_ranks), (Role.DECODE, decode_ranks)):
            for start in range(0, total, ranks_per_link):
                ranks = min(ranks_per_link, total - start)
                register = self._register(role, start, ranks, blocks_per_rank, profile)
                self._links[register.worker_id] = LeanLink(register, blocks_per_rank)

    @property
    def links(self) -> list[LeanLink]:
        return list(self._links.values())

    async def start(self, master: str) -> None:
        """Serves and registers; returns when every link is up."""
        self._session = aiohttp.ClientSession()
        for link in self._links.values():
            app = web.Application()
            app.add_routes([web.get("/link", self._route(link)), web.get("/card", self._get_card)])
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.SockSite(runner, self._sockets[link.register.worker_id]).start()
            self._runners.append(runner)
            keep = keep_registered(
                self._session,
                master=master,
                register=link.register,
                secret=self._secret,
                unlinked=link.unlinked,
                on_change=lambda trouble: None,
            )
            self._tasks.append(asyncio.create_task(keep))
        while any(link.unlinked.is_set() for link in self._links.values()):
            self.tick(clock())
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            if link.connection is not None:
                link.connection.abort("the benchmark is over")
        if self._session is not None:
            await self._session.close()
        for runner in self._runners:
            await runner.cleanup()

    def submit(self, grant: Grant, arrival: Arrival, now: float) -> None:
        """What a frontend's Submit is to a worker."""
        rank = self._links[grant.worker_id].ranks[grant.rank]
        rank.seen.add(grant.number)
        job = Job(grant.request_id, grant.attempt, arrival, now)
        if rank.job is None:
            self._begin(rank, job, now)
        else:
            job.new_tokens = arrival.turn.num_tokens - rank.cache.matched(arrival)
            rank.waiting_tokens += job.new_tokens
            rank.queue.append(job)

    def tick(self, now: float) -> None:
        """Ends what is done by now, then sends what is due."""
        running = self._running
        while running and running[0][0] <= now:
            at, _, rank = heapq.heappop(running)
            self._end(rank, at)
        for link in self._links.values():
            if link.due <= now:
                link.flush(now)

    def running_s(self, now: float) -> float:
        """Seconds spent by now on prompts that have not ended."""
        jobs = [rank.job for _, _, rank in self._running]
        return sum(now - job.started_at for job in jobs if job is not None)

    def _begin(self, rank: LeanRank, job: Job, now: float) -> None:
        num_tokens = job.arrival.turn.num_tokens
        job.cached_tokens = rank.cache.matched(job.arrival)
        job.new_tokens = num_tokens - job.cached_tokens
        job.started_at = now
        job.took_s = self.time_factor * service_s(self._profile, job.new_tokens, job.cached_tokens)
        rank.job = job
        self.num_started += 1
        self.started_s += job.took_s
        heapq.heappush(self._running, (now + job.took_s, self.num_started, rank))

    def _end(self, rank: LeanRank, at: float) -> None:
        job = rank.job
        assert job is not None
        self.busy_s += job.took_s
        self.num_ended += 1
        self.new_tokens += job.new_tokens
        self.cached_tokens += job.cached_tokens
        rank.cache.use(job.arrival)
        link, ids = rank.link, (job.request_id, job.attempt)
        new, cached = job.new_tokens, job.cached_tokens
        queued_s = job.started_at - job.accepted_at
        link.tell(FirstToken(*ids, new, cached, job.took_s, queued_s))
        link.tell(Finished(*ids, "done", new + cached, cached, 1))
        rank.job = None
        self._on_end(job)
        if rank.queue:
            following = rank.queue.popleft()
            rank.waiting_tokens -= following.new_tokens
            self._begin(rank, following, at)

    def _register(
        self, role: Role, start: int, ranks: int, blocks_per_rank: int, profile: Profile
    ) -> Register:
        worker_id = WorkerId(f"{role}-{start:04d}")
        self._sockets[worker_id] = listen("127.0.0.1", 0)
        port = self._sockets[worker_id].getsockname()[1]
        return Register(
            worker_id=worker_id,
            epoch=1,
            address=f"127.0.0.1:{port}",
            role=role,
            ranks=ranks,
            kv_total=(blocks_per_rank * BLOCK,) * ranks,
            block_size=BLOCK,
            model=MODEL,
            max_model_len=1 << 18,
            card=self._card.digest(),
            kv_format="simulated",
            key_id=key_id(self._secret),
            max_batch_tokens=1 << 18,
            profile=profile,
            prefix_closed=True,
            hardware="simulated",
        )

    def _route(self, link: LeanLink) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def dialled(request: web.Request) -> web.StreamResponse:
            return await accept(request, "link", self._secret, link.admit, link.open)

        return dialled

    async def _get_card(self, request: web.Request) -> web.Response:
        body = msgspec.msgpack.encode(self._card)
        return web.Response(body=body, content_type="application/msgpack")


async def every_millisecond(turn: Callable[[float], None], until: Callable[[], bool]) -> None:
    """Calls turn(now) once a millisecond."""
    done = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def fire() -> None:
        if until():
            done.set_result(None)
            return
        loop.call_later(0.001, fire)
        turn(clock())

    fire()
    with contextlib.suppress(asyncio.CancelledError):
        await done

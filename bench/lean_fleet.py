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
import heapq
import socket
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
from aiohttp import web

from bench.conversation import BLOCK, Arrival
from bench.lean_link import Job, LeanLink, LeanRank, clock
from rtp.core.messages import Finished, FirstToken, Grant, Register
from rtp.core.ports import Capacity
from rtp.core.types import Role, WorkerId
from rtp.io.handshake import key_id
from rtp.io.registration import keep_registered
from rtp.io.upgrade import accept
from rtp.rank import byte_card
from rtp.serving import listen

MODEL = "simulated"
Profile = tuple[float, float, float, float, float, float]


class LeanFleet:
    """All links of the fleet and the HTTP servers on which they are dialled. Without decode ranks
    the others do it all.

    on_end(job): a request ended. whole: it does so with its last token, generated on the decode
    rank that the Grant names, or where it began; else with its first.
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
        whole: bool = False,
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
        self.num_decoded = 0
        self.new_tokens = 0
        self.cached_tokens = 0
        self._secret = secret
        self._profile = profile
        self._on_end = on_end
        self._whole = whole
        self._running: list[tuple[float, int, LeanRank]] = []
        self._decoding: list[tuple[float, int, LeanRank, Job]] = []
        self._runners: list[web.AppRunner] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        capacity = Capacity(blocks_per_rank, BLOCK, 1 << 18, 400, (2,), "simulated")
        self._card = byte_card(MODEL, capacity)
        self._sockets: dict[WorkerId, socket.socket] = {}
        self._links: dict[WorkerId, LeanLink] = {}
        first = Role.PREFILL if decode_ranks else Role.FUSION
        for role, total in ((first, prefill_ranks), (Role.DECODE, decode_ranks)):
            for start in range(0, total, ranks_per_link):
                ranks = min(ranks_per_link, total - start)
                register = self._register(role, start, ranks, blocks_per_rank, profile)
                link = LeanLink(register, blocks_per_rank, self._step_s)
                self._links[register.worker_id] = link

    @property
    def links(self) -> list[LeanLink]:
        return list(self._links.values())

    @property
    def num_fences(self) -> int:
        """Grants that the Master took back. A decode rank whose request ended with its first token
        is told so; that is none."""
        idle = not self._whole
        return sum(
            link.num_fences
            for link in self._links.values()
            if not (idle and link.register.role is Role.DECODE)
        )

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
        job = Job(grant.request_id, grant.attempt, arrival, now, grant.decode)
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
        decoding = self._decoding
        while decoding and decoding[0][0] <= now:
            at, _, rank, job = heapq.heappop(decoding)
            self._end_decode(rank, job, at)
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
        rank.cache.use(job.arrival.keys, job.arrival.parts)
        link, ids = rank.link, (job.request_id, job.attempt)
        new, cached = job.new_tokens, job.cached_tokens
        queued_s = job.started_at - job.accepted_at
        link.tell(FirstToken(*ids, new, cached, job.took_s, queued_s))
        rank.job = None
        if not self._whole:
            link.tell(Finished(*ids, "done", new + cached, cached, 1))
            self._on_end(job)
        elif job.decode is None:
            self._decode(rank, job, at)
        else:
            link.tell(Finished(*ids, "handed_over", new + cached, cached, 1))
            other = self._links[job.decode.worker_id].ranks[job.decode.rank]
            other.seen.add(job.decode.number)
            self._decode(other, job, at)
        if rank.queue:
            following = rank.queue.popleft()
            rank.waiting_tokens -= following.new_tokens
            self._begin(rank, following, at)

    def _decode(self, rank: LeanRank, job: Job, now: float) -> None:
        """Generates the output on that rank, which then holds the prompt."""
        turn = job.arrival.turn
        rank.cache.use(job.arrival.keys, job.arrival.parts)
        job.started_at = now
        job.decode_s = turn.output_tokens * self._step_s(rank.rows + 1, rank.context(now))
        rank.begin_decode(turn.num_tokens, turn.output_tokens / job.decode_s, now)
        self.num_decoded += 1
        heapq.heappush(self._decoding, (now + job.decode_s, self.num_decoded, rank, job))

    def _end_decode(self, rank: LeanRank, job: Job, at: float) -> None:
        turn = job.arrival.turn
        rank.end_decode(turn.num_tokens, turn.output_tokens / job.decode_s, job.started_at)
        ids = (job.request_id, job.attempt)
        rank.link.tell(
            Finished(*ids, "done", turn.num_tokens, job.cached_tokens, turn.output_tokens)
        )
        self._on_end(job)

    def _step_s(self, rows: int, context: int) -> float:
        """Seconds of a decode step."""
        _, _, _, d, e, f = self._profile
        return self.time_factor * (d + e * rows + f * context)

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
            transports=("sim",),
        )

    def _route(self, link: LeanLink) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def dialled(request: web.Request) -> web.StreamResponse:
            return await accept(request, "link", self._secret, link.admit, link.open)

        return dialled

    async def _get_card(self, request: web.Request) -> web.Response:
        body = msgspec.msgpack.encode(self._card)
        return web.Response(body=body, content_type="application/msgpack")


def service_s(profile: tuple[float, ...], new: int, cached: int) -> float:
    """Seconds of a prefill (design section 4)."""
    return profile[0] + new * (profile[1] + profile[2] * (cached + 0.5 * new))

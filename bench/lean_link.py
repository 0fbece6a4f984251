"""One simulated worker of a benchmark's fleet: its ranks, their caches, and its end of the Master's
link, kept by the worker's own rules (core/worker/reports)."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from bench.conversation import BLOCK, Arrival
from rtp.core.commands import Send
from rtp.core.messages import STATUS_COLUMNS, Fence, Finished, FirstToken, Place, Poll, Register
from rtp.core.types import HASH_BYTES, RequestId
from rtp.core.worker.reports import Reports, SeenGrants
from rtp.core.worker.stats import Stats
from rtp.io.codec import FrameDecoder, ToWorker
from rtp.io.connection import FrameConnection
from rtp.io.handshake import Claim

WIDTH = len(STATUS_COLUMNS)
COLUMN = {name: i for i, name in enumerate(STATUS_COLUMNS)}
RUNNING, WAITING, PREFILL_TOKENS = (COLUMN[c] for c in ("running", "waiting", "prefill_tokens"))
DECODE_ROWS, CONTEXT_TOKENS = COLUMN["decode_rows"], COLUMN["context_tokens"]
KV_FREE, KV_TOTAL = COLUMN["kv_free"], COLUMN["kv_total"]
STEP_US, STEP_AGE_US = COLUMN["step_us"], COLUMN["step_age_us"]
GRANTED_UPTO, GRANTED_MASK = COLUMN["granted_upto"], COLUMN["granted_mask"]
clock = time.monotonic


@dataclass(slots=True)
class Job:
    """A request on a rank."""

    request_id: RequestId
    attempt: int
    arrival: Arrival
    accepted_at: float
    decode: Place | None
    """Where its output is to be generated; None: where its prompt is."""
    started_at: float = 0.0
    took_s: float = 0.0
    new_tokens: int = 0
    """Until it starts: as its rank's cache stood when it came."""
    cached_tokens: int = 0
    decode_s: float = 0.0


class LeanCache:
    """Segments of blocks that one rank holds; what a CacheReport wants to know of them.

    Least recently used first. A prompt's segments are touched from its tail to its head, so that no
    head leaves before its tails and what is held stays closed under prefixes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_changes = 0
        """Segments that take_changes() would tell of."""
        self.room = num_blocks * HASH_BYTES
        """Bytes of hashes of blocks that are free."""
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

    def use(self, keys: Sequence[int], parts: Sequence[bytes]) -> None:
        """Holds a whole prompt; what has not been used for longest leaves for it."""
        held = self._held
        for key, part in zip(reversed(keys), reversed(parts), strict=True):
            if held.pop(key, None) is None:
                self.room -= len(part)
                self._changed(key, part, True)
            held[key] = part
        while self.room < 0:
            key = next(iter(held))
            part = held.pop(key)
            self.room += len(part)
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
    """One rank: a queue, the prompt that runs, rows that decode, a cache, grant numbers."""

    __slots__ = (
        *("cache", "job", "link", "queue", "rank", "rows", "seen", "waiting_tokens"),
        *("_per_s", "_since", "_tokens"),
    )

    def __init__(self, link: LeanLink, rank: int, num_blocks: int) -> None:
        self.link = link
        self.rank = rank
        self.cache = LeanCache(num_blocks)
        self.seen = SeenGrants()
        self.queue: deque[Job] = deque()
        self.waiting_tokens = 0
        self.job: Job | None = None
        self.rows = 0
        """Sequences that decode."""
        self._tokens = 0.0
        self._per_s = 0.0
        self._since = 0.0

    def context(self, now: float) -> int:
        """Tokens in the pages of the rows that decode."""
        return int(self._tokens + self._per_s * now - self._since)

    def begin_decode(self, tokens: int, per_s: float, now: float) -> None:
        """A row more, with so many tokens now and so many more each second."""
        self.rows += 1
        self._tokens += tokens
        self._per_s += per_s
        self._since += per_s * now

    def end_decode(self, tokens: int, per_s: float, began: float) -> None:
        """What begin_decode() began."""
        self.rows -= 1
        self._tokens -= tokens
        self._per_s -= per_s
        self._since -= per_s * began
        if not self.rows:
            self.end_rows()  # rounding does not add up

    def end_rows(self) -> None:
        """No row decodes any more."""
        self.rows = 0
        self._tokens = self._per_s = self._since = 0.0

    @property
    def kv_total(self) -> int:
        return self.link.register.kv_total[self.rank]


class LeanLink:
    """One worker: its ranks, what it reports of them and when."""

    def __init__(
        self, register: Register, blocks_per_rank: int, step_s: Callable[[int, int], float]
    ) -> None:
        """step_s: seconds of a decode step by its rows and the tokens in their pages."""
        self.register = register
        self.ranks = [LeanRank(self, rank, blocks_per_rank) for rank in range(register.ranks)]
        self.connection: FrameConnection | None = None
        self.unlinked = asyncio.Event()
        self.unlinked.set()
        self.due = inf
        self.num_statuses = 0
        self.num_fences = 0
        self._step_s = step_s
        self._stats = Stats()
        self._term = 0
        pools: Sequence[object] = [rank.cache for rank in self.ranks]
        self._reports = Reports(register, pools, self._stats)  # type: ignore[arg-type]  # see LeanCache
        self._table = array("q", bytes(8 * WIDTH * register.ranks))
        for rank, total in enumerate(register.kv_total):
            self._table[rank * WIDTH + KV_TOTAL] = total

    @property
    def num_deltas(self) -> int:
        return self._stats.deltas

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
        self._reports.changed()  # in this fleet every Status says something new
        self.arm()

    def arm(self) -> None:
        """To be called when a cache has changed."""
        due = self._reports.next_deadline() if self._reports.linked else None
        self.due = inf if due is None else due

    def _on_message(self, message: Poll | Fence) -> None:
        if isinstance(message, Fence):
            self.num_fences += 1
            self.ranks[message.rank].seen.add(message.number)
        else:
            self._reports.polled(message)
        self.arm()

    def _closed(self, reason: str) -> None:
        self.connection = None
        self._reports.down(clock())
        self.due = inf
        self.unlinked.set()

    def _status(self, now: float) -> bytes:
        self.num_statuses += 1
        table, at = self._table, 0
        for rank in self.ranks:
            job, pages, age_s = rank.job, 0, 0.0
            tokens = rank.waiting_tokens
            if job is not None:  # a prompt is one step
                tokens += job.new_tokens
                pages = job.arrival.turn.num_tokens
                age_s = now - job.started_at
            context = rank.context(now) if rank.rows else 0
            if context:
                table[at + STEP_US] = int(1e6 * self._step_s(rank.rows, context))
            table[at + RUNNING] = rank.rows + (job is not None)
            table[at + WAITING] = len(rank.queue)
            table[at + PREFILL_TOKENS] = tokens
            table[at + DECODE_ROWS], table[at + CONTEXT_TOKENS] = rank.rows, context
            table[at + KV_FREE] = max(0, table[at + KV_TOTAL] - pages - context)
            table[at + STEP_AGE_US] = int(1e6 * age_s)
            table[at + GRANTED_UPTO], table[at + GRANTED_MASK] = rank.seen.columns()
            at += WIDTH
        return table.tobytes()

"""What a worker tells its Master, and when: registration, Status, Now, cache reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from rtp.core.commands import Command, Send
from rtp.core.messages import Finished, FirstToken, Now, Poll, Register, Status
from rtp.core.types import RequestId
from rtp.core.worker.blocks import BlockManager
from rtp.core.worker.cache_report import CacheReport
from rtp.core.worker.stats import Stats

MASTER = "master"
REGISTER_PERIOD_S = 1.0
IDLE_BEAT_S = 0.25
MAX_NEWS = 65536
MASK_BITS = 64


class SeenGrants:
    """Which grant numbers of one rank have arrived, in any order, in two numbers.

    A number that is still missing when one arrives that is more than 64 beyond it counts as seen:
    the Master settles it by its lease.
    """

    __slots__ = ("mask", "upto")

    def __init__(self) -> None:
        self.upto = -1
        self.mask = 0

    def add(self, number: int) -> None:
        if number <= self.upto:
            return
        slide = max(0, number - self.upto - MASK_BITS)
        self.upto += slide
        self.mask = (self.mask >> slide) | 1 << (number - self.upto - 1)
        # Whatever slid out, or is contiguous with it, is covered by `upto`.
        while self.mask & 1:
            self.mask >>= 1
            self.upto += 1

    def columns(self) -> tuple[int, int]:
        """(granted_upto, granted_mask), the mask as a signed 64-bit number."""
        return self.upto, self.mask - (1 << MASK_BITS if self.mask >> (MASK_BITS - 1) else 0)


class _News:
    """First tokens and ends, oldest first, kept until a Status that held them is acknowledged."""

    def __init__(self) -> None:
        self._items: deque[FirstToken | Finished] = deque(maxlen=MAX_NEWS)
        self._seqs: deque[int] = deque(maxlen=MAX_NEWS)  # Status that first held the item, or -1
        self._unsent = 0

    def add(self, item: FirstToken | Finished) -> None:
        self._items.append(item)
        self._seqs.append(-1)
        self._unsent = min(self._unsent + 1, MAX_NEWS)

    def all(self, seq: int) -> list[FirstToken | Finished]:
        """Everything unacknowledged, for Status `seq`."""
        self._seqs = deque((held if held >= 0 else seq for held in self._seqs), maxlen=MAX_NEWS)
        return list(self._items)

    def unsent(self) -> list[FirstToken | Finished]:
        """What came since the last call."""
        items = list(self._items)[len(self._items) - self._unsent :] if self._unsent else []
        self._unsent = 0
        return items

    def acknowledge(self, seq: int) -> None:
        while self._seqs and 0 <= self._seqs[0] <= seq:
            self._seqs.popleft()
            self._items.popleft()

    def __len__(self) -> int:
        return len(self._items)


class Reports:
    """The worker's side of the link to its Master. Told the time, never asking it."""

    def __init__(self, card: Register, pools: Sequence[BlockManager], stats: Stats) -> None:
        self.term = -1
        """Highest term seen."""
        self.linked = False
        self.hung = False
        """A step in flight takes far longer than it should."""
        self.cache = CacheReport(card.worker_id, card.epoch, pools, stats)
        self._card = card
        self._stats = stats
        self._news = _News()
        self._poll: Poll | None = None
        self._changed = True
        self._urgent = False
        self._seq = -1
        self._acked = -1
        self._status_at = 0.0
        self._register_at = 0.0

    def up(self, term: int, now: float) -> None:
        """A Master opened the link; one of an earlier term is ignored."""
        if term < self.term:
            return
        self.term = term
        self.linked = True
        self._poll = None
        self._changed = True
        self._status_at = now - IDLE_BEAT_S
        self.cache.restart()

    def down(self, now: float) -> None:
        self.linked = False
        self._poll = None
        self._register_at = now

    def polled(self, poll: Poll) -> None:
        if poll.term < self.term or not self.linked:
            return
        self.term = poll.term
        self._poll = poll
        self._acked = max(self._acked, min(poll.acked_seq, self._seq))
        self._news.acknowledge(poll.acked_seq)
        self.cache.polled(poll.acked_version, poll.acked_seq)

    def changed(self) -> None:
        """Something that a Status tells is no longer as it was."""
        self._changed = True

    def stalled(self, hung: bool) -> None:
        """The next Status does not wait: no step may end for long."""
        self._urgent = self._urgent or hung != self.hung
        self.hung = hung

    def add(self, news: FirstToken | Finished) -> None:
        self._news.add(news)
        self._changed = True

    @property
    def num_unacked(self) -> int:
        return len(self._news)

    def flush(
        self,
        now: float,
        table: Callable[[], bytes],
        draining: bool,
        parked: tuple[RequestId, ...] = (),
    ) -> list[Command]:
        """Everything due by now. table: makes Status.table."""
        if not self.linked:
            return self._register(now)
        out: list[Command] = []
        unsent = self._news.unsent()
        if unsent:
            firsts, ends = _split(unsent)
            out.append(Send(MASTER, Now(self._card.worker_id, self._card.epoch, firsts, ends)))
        if self._poll is None:
            return out
        due = self._status_due()
        if due is not None and now >= due:
            out.append(Send(MASTER, self._status(now, table(), draining, parked)))
        due = self.cache.due_at(self._poll.delta_period_s)
        if due is not None and now >= due:
            out += [Send(MASTER, frame) for frame in self.cache.frames(now, self._seq)]
        return out

    def next_deadline(self) -> float | None:
        if not self.linked:
            return self._register_at
        if self._poll is None:
            return None
        times = (self._status_due(), self.cache.due_at(self._poll.delta_period_s))
        return min((time for time in times if time is not None), default=None)

    def _register(self, now: float) -> list[Command]:
        if now < self._register_at:
            return []
        self._register_at = now + REGISTER_PERIOD_S
        return [Send(MASTER, self._card)]

    def _status_due(self) -> float | None:
        """The idle beat goes out even while a Status is unacknowledged: the lease hangs on it."""
        assert self._poll is not None
        if self._urgent:
            return self._status_at
        if self._changed and self._acked == self._seq:
            return self._status_at + min(self._poll.status_period_s, IDLE_BEAT_S)
        return self._status_at + IDLE_BEAT_S

    def _status(
        self, now: float, table: bytes, draining: bool, parked: tuple[RequestId, ...]
    ) -> Status:
        self._seq += 1
        self._status_at = now
        self._changed = self._urgent = False
        firsts, ends = _split(self._news.all(self._seq))
        return Status(
            worker_id=self._card.worker_id,
            epoch=self._card.epoch,
            term=self.term,
            seq=self._seq,
            table=table,
            first_tokens=firsts,
            finished=ends,
            draining=draining,
            hung=self.hung,
            parked=parked,
            group=self._stats.group_cost() if self._card.lockstep else None,
        )


def status_table(rows: Sequence[Sequence[int]]) -> bytes:
    """int64 [ranks, len(STATUS_COLUMNS)]."""
    return np.array(rows, dtype="<i8").tobytes()


def _split(
    items: list[FirstToken | Finished],
) -> tuple[tuple[FirstToken, ...], tuple[Finished, ...]]:
    firsts = tuple(item for item in items if isinstance(item, FirstToken))
    return firsts, tuple(item for item in items if isinstance(item, Finished))

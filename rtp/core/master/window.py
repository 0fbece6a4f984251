"""Waiting requests of one model as columns: the order, and who waits for a busy rank.

Order: response ratio (age over predicted service) times 2^(priority/4), ties by arrival, then id.
The ratio order changes with time, so no heap is right; one pass over the columns is exact, and
10 us at 5,000 waiting (core/master/order). Past max(30 s, 20 x service) a request is overdue: every
fourth grant of its tenant goes to the oldest of those, so long prompts cannot starve behind short
ones.

Where several tenants wait, all this is the order inside the one whose turn it is by its share.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rtp.core.master.grouping import company, fair_company
from rtp.core.master.order import (
    ARRIVAL,
    DEADLINE,
    ELIGIBLE,
    LENGTH,
    LIMIT,
    NEED,
    SLOT,
    TENANT,
    URGENCY,
    next_slots,
    shortlist,
)
from rtp.core.master.shares import Shares, Standing
from rtp.core.master.tenants import Charge
from rtp.core.messages import Ask
from rtp.core.types import FloatArray, IntArray

OVERDUE_S = 30.0
OVERDUE_SERVICES = 20.0
MOST_PRIORITY = 16
SHORTEST_S = 1e-6
FIRST_SIZE = 64
FREE = -1
MANY = 256
FEW = 64
"""Of more than the one waiting requests, the ones that a round goes on with."""
EVERYBODY: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Waiting:
    """One Ask in the window. Changed by Window only."""

    ask: Ask
    arrival: float
    deadline: float
    """The request is refused when it passes without a grant."""
    asked_at: float = 0.0
    """When this attempt asked; `arrival` is that of the first one."""
    slot: int = FREE
    uncached: int = 0
    service_s: float = 0.0
    held_row: int = FREE
    held_s: float = 0.0
    hold_number: int = 0
    standing: Standing | None = None
    """Its tenant's; set by add()."""
    charge: Charge | None = None
    """What its tenant was charged; goes on with the grant."""


class Window:
    """add, remove; best() for the next to look at; hold() and release for busy ranks."""

    def __init__(self, shares: Shares | None = None, *, by_age: bool = False) -> None:
        """shares: of the tenants; equal ones by default. by_age: the order is age, times the
        priority's factor, whatever the service."""
        self._by_age = by_age
        self.shares = Shares(lambda tenant: 1.0) if shares is None else shares
        self.splits = False
        """Room is that of decode ranks: what ends with its first token needs none."""
        self._slots: list[Waiting | None] = []
        self._free: list[int] = []
        self._table: FloatArray = np.zeros((0, len(SLOT)))
        self._resize(FIRST_SIZE)
        self.num_waiting = 0
        self.num_tokens = 0
        """Uncached prompt tokens waiting, as last looked at."""
        self.service_s = 0.0
        """Predicted prefill seconds waiting."""
        self.num_held = 0
        self.num_grants = 0
        self.next_expiry = np.inf
        """No request's deadline is earlier; exact after expired()."""
        self._skipped: list[Waiting] = []
        self._holds: list[tuple[float, int, Waiting]] = []
        self._held_on: dict[int, list[Waiting]] = {}
        self.num_holds = 0
        """Requests held so far."""
        self._few: IntArray = np.zeros(FEW, dtype=np.int64)
        self._num_few, self._some_late = 0, False
        self._few_at, self._few_room = -np.inf, 0.0
        """Slots that go first in this round, where there are many."""
        self._scores: FloatArray = np.zeros(FEW + 1)

    def __iter__(self) -> Iterator[Waiting]:
        """All waiting requests, held ones included, in slot order."""
        return iter([w for w in self._slots if w is not None])

    @property
    def num_open(self) -> int:
        """Requests that best() may name."""
        return self.num_waiting - self.num_held - len(self._skipped)

    def add(self, waiting: Waiting, uncached: int, service_s: float, need: int) -> None:
        """uncached: prompt tokens to compute. need: pool tokens, output included."""
        if not self._free:
            self._resize(2 * len(self._slots))
        slot = self._free.pop()
        self._slots[slot] = waiting
        waiting.slot = slot
        slots = self._table[slot]
        slots[ARRIVAL], slots[DEADLINE] = waiting.arrival, waiting.deadline
        slots[ELIGIBLE] = 1.0
        waiting.standing = self.shares.join(waiting.ask.tenant)
        slots[TENANT] = waiting.standing.row
        self.num_waiting += 1
        self.next_expiry = min(self.next_expiry, waiting.deadline)
        self._num_few = 0
        self.refresh(waiting, uncached, service_s, need)

    def refresh(self, waiting: Waiting, uncached: int, service_s: float, need: int) -> None:
        """What a new look at its prefix match found; nothing of a request that does not wait."""
        if waiting.slot == FREE:
            return
        ask, standing = waiting.ask, waiting.standing
        assert standing is not None
        self.num_tokens += uncached - waiting.uncached
        self.service_s += service_s - waiting.service_s
        standing.num_tokens += uncached - waiting.uncached
        standing.service_s += service_s - waiting.service_s
        waiting.uncached, waiting.service_s = uncached, service_s
        priority = max(-MOST_PRIORITY, min(MOST_PRIORITY, ask.priority))
        short = self.splits and ask.max_tokens <= 1
        slots = self._table[waiting.slot]
        slots[URGENCY] = 2.0 ** (priority / 4)
        if not self._by_age:
            slots[URGENCY] /= max(service_s, SHORTEST_S)
        slots[LIMIT] = max(OVERDUE_S, OVERDUE_SERVICES * service_s)
        slots[NEED] = -np.inf if short else need
        slots[LENGTH] = uncached

    def remove(self, waiting: Waiting) -> None:
        """Granted, refused, cancelled or replaced. The caller gave back what it held."""
        self.let_go(waiting)
        slot = waiting.slot
        self._slots[slot] = None
        self._table[slot, ELIGIBLE], self._table[slot, DEADLINE] = 0.0, np.inf
        self._free.append(slot)
        waiting.slot = FREE
        self.num_waiting -= 1
        self.num_tokens -= waiting.uncached
        self.service_s = self.service_s - waiting.service_s if self.num_waiting else 0.0
        standing = waiting.standing
        assert standing is not None
        standing.num_tokens -= waiting.uncached
        standing.service_s -= waiting.service_s
        self.shares.leave(standing)

    # ------------------------------------------------------------ the order

    def best(self, now: float, room: float) -> Waiting | None:
        """The one to look at next among those that need at most `room` pool tokens.

        Held and skipped requests take no part. An overdue request is told even if it needs more
        room: the caller makes some for it. Of several tenants' the one's that was served least for
        its weight, of those with one that can go.
        """
        if len(self._slots) > MANY and self.shares.num_active == 1:
            best = self._best_of_few(now, room)
            if best is not None:
                return best
        return self._best_of(EVERYBODY, now, room)

    def _best_of_few(self, now: float, room: float) -> Waiting | None:
        """Of a backlog: all are gone through once a round, and the best of them at each look. None
        where it may be another."""
        if not self._num_few or now != self._few_at or room > self._few_room:
            self._few_at, self._few_room = now, room
            count = shortlist(self._table, now, room, self._few, self._scores)
            self._num_few, self._some_late = abs(count), count < 0
            if not count:
                return None
        best = self._best_of(self._few[: self._num_few], now, room)
        if best is not None:
            assert best.standing is not None
            score = (now - best.arrival) * self._table.item(best.slot, URGENCY)
            late = self._some_late and self.shares.turn.item(best.standing.row)
            if score > self._scores.item(FEW) and not late:
                return best
        self._num_few = 0
        return None

    def _best_of(self, among: IntArray, now: float, room: float) -> Waiting | None:
        """among: slots."""
        shares, found = self.shares, self._found
        count = next_slots(self._table, among, shares.virtual_s, shares.turn, now, room, found)
        if count <= 1:
            return self._slots[found.item(0)] if count else None
        return min(self._at(found[:count]), key=_request_id)

    def _at(self, slots: IntArray) -> list[Waiting]:
        found = (self._slots[i] for i in slots.tolist())
        return [waiting for waiting in found if waiting is not None]

    def first_of(self, among: list[Waiting], now: float) -> Waiting:
        """The first in the order of some that wait, held ones included."""
        if len(among) == 1:
            return among[0]

        def place(waiting: Waiting) -> tuple[float, float, float, str]:
            assert waiting.standing is not None
            served_s = self.shares.virtual_s.item(waiting.standing.row)
            score = (now - waiting.arrival) * self._table.item(waiting.slot, URGENCY)
            return served_s, -score, waiting.arrival, waiting.ask.request_id

        return min(among, key=place)

    def granted(self, waiting: Waiting, service_s: float, leads: bool = True) -> None:
        """It goes to a rank, which will serve it for so long by prediction. leads: by the order,
        not as another's company."""
        assert waiting.standing is not None
        self.num_grants += 1
        self.shares.granted(waiting.standing, service_s, leads)

    def bound(self, tenant: str, service_s: float) -> None:
        """A request that did not wait goes to a rank. It is no turn; while others wait, its service
        counts as its tenant's."""
        self.num_grants += 1
        if self.shares.num_active:
            self.shares.bound(tenant, service_s)

    def newest_of(self, standing: Standing) -> Waiting | None:
        """Of one tenant's requests the last that came, held ones included."""
        arrival, deadline = self._table[:, ARRIVAL], self._table[:, DEADLINE]
        own = (self._table[:, TENANT] == standing.row) & (deadline < np.inf)
        own &= arrival == arrival[own].max(initial=-np.inf)
        return max(self._at(own.nonzero()[0]), key=_request_id, default=None)

    def company(self, first: Waiting, count: int, room: float, at_ease: float) -> list[Waiting]:
        """Up to `count` others that may start together with `first` (core/master/grouping), of
        those that need at most `room` pool tokens each."""
        table = self._table
        eligible = (table[:, ELIGIBLE] > 0) & (table[:, NEED] <= room)
        eligible[first.slot] = False
        columns = (table[:, LENGTH], table[:, ARRIVAL], eligible)
        if self.shares.num_active > 1:
            tenant = table[:, TENANT].astype(np.int64)
            served_s = self.shares.virtual_s.take(tenant)
            served_s[tenant == tenant[first.slot]] += self._charge_s(first.slot)
            found = np.array(
                fair_company(
                    first.uncached, *columns, count, at_ease, tenant, served_s, self._charge_s
                ),
                dtype=np.int64,
            )
        else:
            found = company(first.uncached, *columns, count, at_ease)
        return self._at(found)

    def _charge_s(self, slot: int) -> float:
        """Predicted service of a request by the weight of its tenant."""
        waiting = self._slots[slot]
        assert waiting is not None
        assert waiting.standing is not None
        return waiting.service_s / waiting.standing.weight

    def overdue(self, waiting: Waiting, now: float) -> bool:
        return now - waiting.arrival > self._table.item(waiting.slot, LIMIT)

    def need(self, waiting: Waiting) -> float:
        """Pool tokens it takes, as last looked at."""
        return self._table.item(waiting.slot, NEED)

    def skip(self, waiting: Waiting) -> None:
        """Looked at in vain: no part until unskip()."""
        self._table[waiting.slot, ELIGIBLE] = 0.0
        self._skipped.append(waiting)

    def unskip(self) -> None:
        """The round is over."""
        self._num_few = 0
        for waiting in self._skipped:
            if waiting.slot != FREE and waiting.held_row == FREE:
                self._table[waiting.slot, ELIGIBLE] = 1.0
        self._skipped.clear()

    # ------------------------------------------------------------ waiting for a busy rank

    def hold(self, waiting: Waiting, row: int, until: float, seconds: float) -> None:
        """It waits for `row`, charged `seconds` there, no longer than `until`."""
        self._table[waiting.slot, ELIGIBLE] = 0.0
        waiting.held_row, waiting.held_s = row, seconds
        self._held_on.setdefault(row, []).append(waiting)
        self.num_held += 1
        self.num_holds += 1
        waiting.hold_number = self.num_holds
        heapq.heappush(self._holds, (until, self.num_holds, waiting))

    def let_go(self, waiting: Waiting) -> None:
        """Back into the order, if it was held."""
        if waiting.held_row == FREE:
            return
        self._num_few = 0
        held = self._held_on[waiting.held_row]
        held.remove(waiting)
        if not held:
            del self._held_on[waiting.held_row]
        waiting.held_row, waiting.held_s = FREE, 0.0
        self._table[waiting.slot, ELIGIBLE] = 1.0
        self.num_held -= 1

    def held_on(self, row: int) -> list[Waiting]:
        return list(self._held_on.get(row, ()))

    def rows_with_held(self) -> list[int]:
        return list(self._held_on)

    def held_too_long(self, now: float) -> list[Waiting]:
        """Those whose rank was to be free by now; each is told once."""
        over = []
        while self._holds and self._holds[0][0] <= now:
            _, number, waiting = heapq.heappop(self._holds)
            if waiting.held_row != FREE and waiting.hold_number == number:
                over.append(waiting)
        return over

    @property
    def next_hold(self) -> float:
        return self._holds[0][0] if self._holds else np.inf

    # ------------------------------------------------------------ deadlines

    def expired(self, now: float) -> list[Waiting]:
        """Requests whose deadline passed, oldest slot first; they stay until removed."""
        if now < self.next_expiry:
            return []
        deadline = self._table[:, DEADLINE]
        self.next_expiry = deadline[deadline > now].min(initial=np.inf).item()
        return self._at((deadline <= now).nonzero()[0])

    def _resize(self, size: int) -> None:
        old = len(self._slots)
        self._slots += [None] * (size - old)
        self._free += range(size - 1, old - 1, -1)
        table: FloatArray = np.zeros((size, len(SLOT)))
        table[old:, DEADLINE] = np.inf
        table[:old] = self._table
        self._table = table
        self._found: IntArray = np.zeros(size, dtype=np.int64)


def _request_id(waiting: Waiting) -> str:
    return waiting.ask.request_id

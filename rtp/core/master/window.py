"""Waiting requests of one model as columns: the order, and who waits for a busy rank.

Order: response ratio (age over predicted service) times 2^(priority/4), ties by arrival, then id.
The ratio order changes with time, so no heap is right; one argmax over numpy columns is exact, and
5 us at 5,000 waiting. Past max(30 s, 20 x service) a request is overdue: every fourth grant goes to
the oldest of those, so long prompts cannot starve behind short ones.

Where several tenants wait, all this is the order inside the one whose turn it is by its share.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rtp.core.master.grouping import company, fair_company
from rtp.core.master.shares import OVERDUE_EVERY, Shares, Standing
from rtp.core.master.tenants import Charge
from rtp.core.messages import Ask
from rtp.core.types import BoolArray, FloatArray

OVERDUE_S = 30.0
OVERDUE_SERVICES = 20.0
MOST_PRIORITY = 16
SHORTEST_S = 1e-6
FIRST_SIZE = 64
FREE = -1


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

    def __init__(self, shares: Shares | None = None) -> None:
        """shares: of the tenants; equal ones by default."""
        self.shares = Shares(lambda tenant: 1.0) if shares is None else shares
        self.splits = False
        """Room is that of decode ranks: what ends with its first token needs none."""
        self._slots: list[Waiting | None] = []
        self._free: list[int] = []
        self._resize(FIRST_SIZE)
        self.num_waiting = 0
        self.num_tokens = 0
        """Uncached prompt tokens waiting, as last looked at."""
        self.service_s = 0.0
        """Predicted prefill seconds waiting."""
        self.num_held = 0
        self.num_grants = 0
        self.num_turns = 0
        """Grants by the order; those that start together are one."""
        self.next_expiry = np.inf
        """No request's deadline is earlier; exact after expired()."""
        self._skipped: list[Waiting] = []
        self._holds: list[tuple[float, int, Waiting]] = []
        self._held_on: dict[int, list[Waiting]] = {}
        self._scored_at = -np.inf
        self._changed: set[int] = set()
        """Slots whose score is not as it was when all were worked out."""
        self.num_holds = 0
        """Requests held so far."""

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
        priority = max(-MOST_PRIORITY, min(MOST_PRIORITY, waiting.ask.priority))
        self._weight[slot] = 2.0 ** (priority / 4)
        self._arrival[slot] = waiting.arrival
        self._deadline[slot] = waiting.deadline
        self._eligible[slot] = True
        waiting.standing = self.shares.join(waiting.ask.tenant)
        self._tenant[slot] = waiting.standing.row
        self.num_waiting += 1
        self.next_expiry = min(self.next_expiry, waiting.deadline)
        self.refresh(waiting, uncached, service_s, need)

    def refresh(self, waiting: Waiting, uncached: int, service_s: float, need: int) -> None:
        """What a new look at its prefix match found; nothing of a request that does not wait."""
        if waiting.slot == FREE:
            return
        slot, standing = waiting.slot, waiting.standing
        assert standing is not None
        self.num_tokens += uncached - waiting.uncached
        self.service_s += service_s - waiting.service_s
        standing.num_tokens += uncached - waiting.uncached
        standing.service_s += service_s - waiting.service_s
        waiting.uncached, waiting.service_s = uncached, service_s
        self._urgency[slot] = self._weight[slot] / max(service_s, SHORTEST_S)
        self._limit[slot] = max(OVERDUE_S, OVERDUE_SERVICES * service_s)
        short = self.splits and waiting.ask.max_tokens <= 1
        self._need[slot] = -np.inf if short else need
        self._length[slot] = uncached
        self._changed.add(slot)

    def remove(self, waiting: Waiting) -> None:
        """Granted, refused, cancelled or replaced. The caller gave back what it held."""
        self.let_go(waiting)
        slot = waiting.slot
        self._slots[slot] = None
        self._eligible[slot] = False
        self._deadline[slot] = np.inf
        self._changed.add(slot)
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
        room: the caller makes some for it. With one tenant 4 array calls, and 4 more the first time
        of a round; else 15.
        """
        if self.shares.num_active > 1:
            return self._best_of_shares(now, room)
        if self.num_turns % OVERDUE_EVERY == OVERDUE_EVERY - 1:
            overdue = self.oldest_overdue(now)
            if overdue is not None:
                return overdue
        if self.num_open == 1:
            alone = self._slots[int(self._eligible.argmax())]
            assert alone is not None
            return alone if self.need(alone) <= room else None
        score = self._scores(now)
        first = int(score.argmax())
        if self._need.item(first) > room:
            score = np.where(self._need <= room, score, -1.0)
            first = int(score.argmax())
        top = score.item(first)
        if top < 0:
            return None
        ties = score == top
        return self._slots[first] if np.count_nonzero(ties) == 1 else self._earliest(ties)

    def _scores(self, now: float) -> FloatArray:
        """[slots], -1 where best() may not name it. Worked out once a round: then only what
        changed, for a backlog has thousands."""
        if now != self._scored_at:
            self._scored_at = now
            self._score = np.where(self._eligible, (now - self._arrival) * self._urgency, -1.0)
        else:
            for slot in self._changed:
                age = now - self._arrival.item(slot)
                eligible = self._eligible.item(slot)
                self._score[slot] = age * self._urgency.item(slot) if eligible else -1.0
        self._changed.clear()
        return self._score

    def first_of(self, among: list[Waiting], now: float) -> Waiting:
        """The first in the order of some that wait, held ones included."""
        if len(among) == 1:
            return among[0]

        def place(waiting: Waiting) -> tuple[float, float, float, str]:
            assert waiting.standing is not None
            served_s = self.shares.virtual_s.item(waiting.standing.row)
            score = (now - waiting.arrival) * self._urgency.item(waiting.slot)
            return served_s, -score, waiting.arrival, waiting.ask.request_id

        return min(among, key=place)

    def _best_of_shares(self, now: float, room: float) -> Waiting | None:
        """The best of the tenant that was served least for its weight, of those with one that can
        go; its overdue ones have every fourth of its own grants."""
        shares, tenant, age = self.shares, self._tenant, now - self._arrival
        late = self._eligible & shares.turn.take(tenant) & (age > self._limit)
        among = late | (self._eligible & (self._need <= room))
        if not among.any():
            return None
        served = np.where(among, shares.virtual_s.take(tenant), np.inf)
        among &= served == served.min()
        late &= among
        if late.any():
            return self._earliest(late)
        score = np.where(among, age * self._urgency, -1.0)
        return self._earliest(score == score.max())

    def granted(self, waiting: Waiting, service_s: float, leads: bool = True) -> None:
        """It goes to a rank, which will serve it for so long by prediction. leads: by the order,
        not as another's company."""
        assert waiting.standing is not None
        self.num_grants += 1
        self.num_turns += leads
        self.shares.granted(waiting.standing, service_s, leads)

    def bound(self, tenant: str, service_s: float) -> None:
        """A request that did not wait goes to a rank. It is no turn; while others wait, its service
        counts as its tenant's."""
        self.num_grants += 1
        if self.shares.num_active:
            self.shares.bound(tenant, service_s)

    def newest_of(self, standing: Standing) -> Waiting | None:
        """Of one tenant's requests the last that came, held ones included."""
        slots = ((self._tenant == standing.row) & (self._deadline < np.inf)).nonzero()[0]
        arrival = self._arrival[slots]
        last = [self._slots[i] for i in slots[arrival == arrival.max(initial=-np.inf)].tolist()]
        return max((w for w in last if w is not None), key=_request_id, default=None)

    def oldest_overdue(self, now: float) -> Waiting | None:
        overdue = self._eligible & (now - self._arrival > self._limit)
        return self._earliest(overdue) if np.count_nonzero(overdue) else None

    def company(self, first: Waiting, count: int, room: float, at_ease: float) -> list[Waiting]:
        """Up to `count` others that may start together with `first` (core/master/grouping), of
        those that need at most `room` pool tokens each."""
        eligible = self._eligible & (self._need <= room)
        eligible[first.slot] = False
        columns = (self._length, self._arrival, eligible)
        if self.shares.num_active > 1:
            served_s = self.shares.virtual_s.take(self._tenant)
            served_s[self._tenant == self._tenant[first.slot]] += self._charge_s(first.slot)
            found = fair_company(
                first.uncached, *columns, count, at_ease, self._tenant, served_s, self._charge_s
            )
        else:
            found = company(first.uncached, *columns, count, at_ease).tolist()
        return [w for w in (self._slots[i] for i in found) if w is not None]

    def _charge_s(self, slot: int) -> float:
        """Predicted service of a request by the weight of its tenant."""
        waiting = self._slots[slot]
        assert waiting is not None
        assert waiting.standing is not None
        return waiting.service_s / waiting.standing.weight

    def overdue(self, waiting: Waiting, now: float) -> bool:
        return bool(now - waiting.arrival > self._limit[waiting.slot])

    def need(self, waiting: Waiting) -> float:
        """Pool tokens it takes, as last looked at."""
        return float(self._need[waiting.slot])

    def skip(self, waiting: Waiting) -> None:
        """Looked at in vain: no part until unskip()."""
        self._eligible[waiting.slot] = False
        self._changed.add(waiting.slot)
        self._skipped.append(waiting)

    def unskip(self) -> None:
        """The round is over."""
        for waiting in self._skipped:
            if waiting.slot != FREE and waiting.held_row == FREE:
                self._eligible[waiting.slot] = True
                self._changed.add(waiting.slot)
        self._skipped.clear()

    def _earliest(self, among: BoolArray) -> Waiting:
        """Ties: by arrival, then id."""
        slots = among.nonzero()[0]
        if len(slots) > 1:
            arrival = self._arrival[slots]
            slots = slots[arrival == arrival.min()]
        waiting = [w for w in (self._slots[i] for i in slots.tolist()) if w is not None]
        return min(waiting, key=_request_id) if len(waiting) > 1 else waiting[0]

    # ------------------------------------------------------------ waiting for a busy rank

    def hold(self, waiting: Waiting, row: int, until: float, seconds: float) -> None:
        """It waits for `row`, charged `seconds` there, no longer than `until`."""
        self._eligible[waiting.slot] = False
        self._changed.add(waiting.slot)
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
        held = self._held_on[waiting.held_row]
        held.remove(waiting)
        if not held:
            del self._held_on[waiting.held_row]
        waiting.held_row, waiting.held_s = FREE, 0.0
        self._eligible[waiting.slot] = True
        self._changed.add(waiting.slot)
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
        late = [self._slots[i] for i in (self._deadline <= now).nonzero()[0].tolist()]
        left = self._deadline[self._deadline > now]
        self.next_expiry = float(left.min()) if len(left) else np.inf
        return [w for w in late if w is not None]

    def _resize(self, size: int) -> None:
        self._scored_at = -np.inf
        old = len(self._slots)
        more = size - old
        self._slots += [None] * more
        self._free += range(size - 1, old - 1, -1)
        if not old:
            self._arrival = np.zeros(0)
            self._urgency, self._weight, self._limit = np.zeros(0), np.zeros(0), np.zeros(0)
            self._need, self._deadline, self._length = np.zeros(0), np.zeros(0), np.zeros(0)
            self._eligible = np.zeros(0, dtype=np.bool_)
            self._tenant = np.zeros(0, dtype=np.int64)
        self._arrival = np.pad(self._arrival, (0, more))
        self._urgency = np.pad(self._urgency, (0, more))
        self._weight = np.pad(self._weight, (0, more))
        self._limit = np.pad(self._limit, (0, more))
        self._need = np.pad(self._need, (0, more))
        self._length = np.pad(self._length, (0, more))
        self._deadline = np.pad(self._deadline, (0, more), constant_values=np.inf)
        self._eligible = np.pad(self._eligible, (0, more))
        self._tenant = np.pad(self._tenant, (0, more))


def _request_id(waiting: Waiting) -> str:
    return waiting.ask.request_id

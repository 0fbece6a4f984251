"""Fair shares of one model's service between the tenants that wait for it.

Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996): a tenant's virtual time is the predicted
service it was granted over its weight, and the next grant goes to the least one. A tenant that
comes back starts no earlier than where the others have got to, so that nobody saves shares up:

    join:   v = max(v, clock)         grant:  clock = max(clock, v);  v += service_s / weight

However much one tenant has waiting, a lone request of another is next in turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rtp.core.types import BoolArray, FloatArray

FIRST_SIZE = 16
OVERDUE_EVERY = 4
"""Of so many grants of a tenant one goes to an overdue request of it, if there is one."""
MOST_TRIES = 4
"""Tenants looked at to make room for a new one."""


@dataclass(slots=True, eq=False)
class Standing:
    """One tenant that waits or was here lately. Changed by Shares only."""

    tenant: str
    row: int
    """In the columns."""
    weight: float
    num_waiting: int = 0
    num_tokens: int = 0
    """Uncached prompt tokens of those requests."""
    service_s: float = 0.0
    """Their predicted service."""
    num_turns: int = 0


class Shares:
    """join() and leave() with each request; virtual_s and turn are columns by tenant."""

    def __init__(self, weight: Callable[[str], float], capacity: int = 1024) -> None:
        """capacity: tenants remembered; more only while more wait at one time."""
        self._weight = weight
        self._capacity = capacity
        self._standings: OrderedDict[str, Standing] = OrderedDict()
        """Who has gone longest without coming anew in front."""
        self._free: list[int] = []
        self._clock = 0.0
        self._active_weight = 0.0
        self.num_active = 0
        """Tenants with a request waiting."""
        self.virtual_s: FloatArray = np.zeros(0)
        self.turn: BoolArray = np.zeros(0, dtype=np.bool_)
        """Whose next grant is for an overdue request of it, if there is one."""

    def __len__(self) -> int:
        return len(self._standings)

    def find(self, tenant: str) -> Standing | None:
        return self._standings.get(tenant)

    def join(self, tenant: str) -> Standing:
        """One more request of it waits."""
        standing = self._standings.get(tenant)
        if standing is None:
            standing = self._standings[tenant] = self._new(tenant)
        if not standing.num_waiting:
            self._standings.move_to_end(tenant)
            self.num_active += 1
            self._active_weight += standing.weight
            row = standing.row
            self.virtual_s[row] = max(float(self.virtual_s[row]), self._clock)
        standing.num_waiting += 1
        return standing

    def leave(self, standing: Standing) -> None:
        """One request fewer."""
        standing.num_waiting -= 1
        if not standing.num_waiting:
            standing.num_tokens, standing.service_s = 0, 0.0
            self.num_active -= 1
            self._active_weight -= standing.weight
            if not self.num_active:
                self._active_weight = 0.0

    def granted(self, standing: Standing, service_s: float, leads: bool = True) -> None:
        """A grant of so much predicted service went to it. leads: as its turn, not as company of
        a request whose turn it was (core/master/grouping)."""
        row = standing.row
        start = float(self.virtual_s[row])
        self._clock = max(self._clock, start)
        self.virtual_s[row] = start + service_s / standing.weight
        standing.num_turns += leads
        self.turn[row] = standing.num_turns % OVERDUE_EVERY == OVERDUE_EVERY - 1

    def bound(self, tenant: str, service_s: float) -> None:
        """A grant of so much predicted service to a request of it that did not wait."""
        standing = self.join(tenant)
        self.granted(standing, service_s, leads=False)
        self.leave(standing)

    def share(self, tenant: str) -> float:
        """Its part of the service, above 0 to 1, were it to wait beside those that wait now."""
        own, standing = self._weight(tenant), self._standings.get(tenant)
        waits = standing is not None and standing.num_waiting > 0
        return min(1.0, own / (self._active_weight + (0.0 if waits else own)))

    def most_over(self, amount: Callable[[Standing], float]) -> Standing | None:
        """The tenant with most of something per weight; None when nobody waits. O(tenants)."""
        active = [s for s in self._standings.values() if s.num_waiting]
        return max(active, key=lambda s: (amount(s) / s.weight, s.tenant), default=None)

    def _new(self, tenant: str) -> Standing:
        if len(self._standings) >= self._capacity:
            self._forget()
        if not self._free:
            self._resize(max(FIRST_SIZE, 2 * len(self.virtual_s)))
        row = self._free.pop()
        self.virtual_s[row], self.turn[row] = self._clock, False
        return Standing(tenant, row, self._weight(tenant))

    def _forget(self) -> None:
        """The longest absent go. One that waits is passed by, for the next time as well."""
        for _ in range(MOST_TRIES):
            tenant, standing = next(iter(self._standings.items()))
            if standing.num_waiting:
                self._standings.move_to_end(tenant)
            else:
                del self._standings[tenant]
                self._free.append(standing.row)
            if len(self._standings) < self._capacity:
                return

    def _resize(self, size: int) -> None:
        old = len(self.virtual_s)
        self._free += range(size - 1, old - 1, -1)
        self.virtual_s = np.pad(self.virtual_s, (0, size - old))
        self.turn = np.pad(self.turn, (0, size - old))

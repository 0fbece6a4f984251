"""Open bookings by request, and what time settles of them: leases, unconfirmed arrivals.

A booking ends by a Finished, a Fence, a lease that ran out, its worker's loss, or a Cancel; whoever
comes first calls release, and it all goes back at once: the rank's columns, the blocks counted as
arriving, what is reserved on a decode rank. At a hand-over, or when its prefill rank is lost, the
reservation becomes the request's booking: nobody knows whether its frontend asks anew or the decode
rank has it, so it has a lease of its own. (What ends those that nobody submits: external.py.)
"""

from __future__ import annotations

from collections import deque
from math import inf

from rtp.core.master.booking import Booking
from rtp.core.master.due_times import DueTimes
from rtp.core.master.prefix_map import PrefixMap
from rtp.core.master.ranks import Ranks
from rtp.core.master.tenants import Tenants
from rtp.core.types import Hashes, IntArray, RequestId

LINGER_S = 0.2
"""Blocks of a request that ended well stay credited so long: their Delta comes 50 ms later."""


class Ledger:
    """charge() at the grant, release() once at the end, whatever the end is."""

    def __init__(
        self,
        ranks: Ranks,
        prefix_map: PrefixMap,
        tenants: Tenants,
        expiry_s: float,
        *,
        arriving: bool = True,
    ) -> None:
        """expiry_s: lease and margin; a grant no Status has seen by then is settled. arriving:
        blocks count on a rank from the grant on, not from the rank's word on."""
        self._arriving = arriving
        self._ranks = ranks
        self._map = prefix_map
        self._tenants = tenants
        self._expiry_s = expiry_s
        self.external = DueTimes()
        """External bookings by the time something is to be done about them."""
        self._bookings: dict[RequestId, Booking] = {}
        self._leases: deque[tuple[float, Booking]] = deque()
        self._lingering: deque[tuple[float, int, Hashes]] = deque()

    def __len__(self) -> int:
        return len(self._bookings)

    def find(self, request_id: RequestId, attempt: int | None = None) -> Booking | None:
        """The request's open booking, if it is this attempt's."""
        booking = self._bookings.get(request_id)
        if booking is None or (attempt is not None and booking.grant.attempt != attempt):
            return None
        return booking

    def charge(self, booking: Booking, hashes: Hashes, held: int) -> None:
        """hashes: of the prompt, of which `held` leading blocks matched on the rank."""
        self._ranks.charge(booking)
        if self._arriving:
            booking.arriving = self._map.arrive(booking.row, hashes, held)
        self._bookings[booking.grant.request_id] = booking
        if booking.external:
            self.external.set(booking, min(booking.lease_ends, self._ranks.busy_until[booking.row]))
        else:
            self._leases.append((booking.granted_at + self._expiry_s, booking))
        if booking.decode is not None:
            self._ranks.charge(booking.decode)

    def hand_over(self, booking: Booking, now: float) -> Booking:
        """Its prefill rank has done its part: from now on it is what was reserved for it."""
        decode = booking.decode
        assert decode is not None
        self._ranks.release(booking)
        self._lingering.append((now + LINGER_S, booking.row, booking.arriving))
        self._carry_on(booking, decode, now)
        return decode

    def forgo(self, booking: Booking) -> None:
        """What is reserved for it on a decode rank goes back; it ends where it began."""
        decode, booking.decode = booking.decode, None
        if decode is not None:
            self._ranks.release(decode)

    def release(self, booking: Booking, now: float, *, done: bool = False, used: float = 0) -> None:
        """done: it computed its prompt, so a Delta will confirm its blocks. used: tokens its tenant
        is charged for it in the end; none for an attempt that failed."""
        self._end(booking, used, now)
        if done:
            self._lingering.append((now + LINGER_S, booking.row, booking.arriving))
        else:
            self._map.settle(booking.row, booking.arriving)

    def release_rows(self, rows: IntArray, now: float) -> int:
        """The worker is gone: its bookings end, its keys are masked. Returns how many ended."""
        count = 0
        gone = set(rows.tolist())
        for row in rows.tolist():
            for booking in self._ranks.bookings(row):
                if booking.prefill is not None:
                    self.forgo(booking.prefill)
                elif booking.decode is not None and not booking.external:
                    self._ranks.release(booking)
                    self._carry_on(booking, booking.decode, now)
                else:
                    self._end(booking, 0, now)
                    count += 1
            self._map.drop_rank(row)
        # The rows may be another worker's soon: what lingers there must not be settled on it.
        self._lingering = deque(x for x in self._lingering if x[1] not in gone)
        return count

    def expired(self, now: float) -> list[Booking]:
        """Unseen bookings whose lease and margin are over, oldest first; each is told once."""
        over = []
        while self._leases and (self._leases[0][0] <= now or self._settled(self._leases[0][1])):
            _, booking = self._leases.popleft()
            if not self._settled(booking):
                over.append(booking)
        return over

    def extend(self, booking: Booking, now: float) -> None:
        """Its worker is silent, so nobody knows: ask again later."""
        self._leases.append((now + self._expiry_s, booking))

    def settle_lingering(self, now: float) -> None:
        while self._lingering and self._lingering[0][0] <= now:
            _, row, arriving = self._lingering.popleft()
            self._map.settle(row, arriving)

    @property
    def next_due(self) -> float:
        lease = self._leases[0][0] if self._leases else inf
        lingering = self._lingering[0][0] if self._lingering else inf
        return min(lease, lingering, self.external.next_due)

    def idle(self) -> bool:
        return not self._bookings and self._ranks.idle()

    def check(self) -> None:
        self._ranks.check()
        assert all(b.open and id == b.grant.request_id for id, b in self._bookings.items())
        split = [b.decode for b in self._bookings.values() if b.decode is not None]
        assert all(d.prefill is not None and d.prefill.decode is d for d in split)
        assert all(b.prefill is None for b in self._bookings.values())
        assert len(self._bookings) + len(split) == self._ranks.num_bookings
        assert len(self.external) == sum(b.external for b in self._bookings.values())

    def _carry_on(self, booking: Booking, decode: Booking, now: float) -> None:
        booking.decode = decode.prefill = None
        decode.charge, decode.first_token, decode.handed = booking.charge, True, True
        decode.computed_tokens = booking.computed_tokens
        self._bookings[decode.grant.request_id] = decode
        self._leases.append((now + self._expiry_s, decode))

    def _end(self, booking: Booking, used: float, now: float) -> None:
        self._ranks.release(booking)
        if booking.decode is not None:
            self._ranks.release(booking.decode)
            booking.decode.prefill = None  # else only a collector would find the two
        del self._bookings[booking.grant.request_id]
        if booking.external:
            self.external.drop(booking)
        if booking.charge is not None:
            self._tenants.settle(booking.charge, used, now)

    @staticmethod
    def _settled(booking: Booking) -> bool:
        return booking.seen or not booking.open

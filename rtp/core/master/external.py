"""Grants that nobody submits: in router-only mode the caller's own engine runs the request, and no
Status ever tells of it.

Such a booking charges its rank like any other but takes none of the rank's numbers, which a Status
would have to count past. Its prompt is prefill work until the prefill's predicted end, or until the
caller says so; then it is context. All of it goes back when the caller is done with it or calls it
off, and at the latest when its lease ends.
"""

from __future__ import annotations

from rtp.core.commands import Command, Note
from rtp.core.master.booking import Booking
from rtp.core.master.fleet import Fleet
from rtp.core.master.ledger import Ledger
from rtp.core.master.ranks import Ranks
from rtp.core.master.totals import Totals
from rtp.core.messages import Done, Renew


class External:
    """What settles them beside Cancel and a worker's loss."""

    def __init__(self, ranks: Ranks, ledger: Ledger, fleet: Fleet, totals: Totals) -> None:
        self._ranks = ranks
        self._ledger = ledger
        self._fleet = fleet
        self._totals = totals

    def done(self, done: Done, now: float) -> list[Command]:
        """The request ran to its end, or failed, elsewhere. Unknown ones have ended before."""
        booking = self._ledger.find(done.request_id, done.attempt)
        if booking is None or not booking.external:
            return []
        ran = done.reason == "done"
        totals, pool = self._totals, self._fleet.pools[booking.model]
        totals.finished["done" if ran else "failed"] += 1
        if ran and done.generated >= 0:
            pool.outputs.observe(booking.tenant, done.generated / max(1, booking.choices))
        if ran and done.cached_tokens >= 0:
            totals.prompt_tokens += done.prompt_tokens
            totals.predicted_hit_tokens += booking.grant.matched_tokens
            totals.hit_tokens += done.cached_tokens
            if booking.grant.matched_tokens and not done.cached_tokens:
                totals.missed_predictions += 1
        new = done.prompt_tokens - max(done.cached_tokens, 0)
        if ran and done.prefill_s > 0 and new > 0:
            member, _ = self._fleet.at_row(booking.row)
            member.hardware.observe_prefill(new, max(done.cached_tokens, 0), done.prefill_s)
            self._fleet.learned(member)
        used = _expected(booking)
        if done.cached_tokens >= 0 and done.generated >= 0:
            used = done.prompt_tokens - done.cached_tokens + done.generated
        self._release(booking, now, done=ran, used=used if ran else 0)
        return []

    def renew(self, renew: Renew, now: float) -> list[Command]:
        booking = self._ledger.find(renew.request_id, renew.attempt)
        if booking is None or not booking.external:
            return []
        booking.lease_ends = now + renew.lease_s
        if renew.prefilled:
            self._ranks.prefilled(booking, early=True)
            self._fleet.pools[booking.model].dirty = True
        if not booking.new_tokens:
            self._ledger.external.set(booking, booking.lease_ends)
        return []

    def expire(self, now: float) -> list[Command]:
        """Prefills that should be over by now; leases that are."""
        out: list[Command] = []
        for booking in self._ledger.external.take(now):
            if now < booking.lease_ends:
                self._ranks.prefilled(booking, early=False)
                self._ledger.external.set(booking, booking.lease_ends)
                continue
            self._totals.external_lapsed += 1
            facts: dict[str, object] = {
                "request_id": booking.grant.request_id,
                "worker_id": booking.grant.worker_id,
                "rank": booking.grant.rank,
            }
            out.append(Note("schedule.lapsed", facts))
            self._release(booking, now, used=_expected(booking))
        return out

    def _release(
        self, booking: Booking, now: float, *, done: bool = False, used: float = 0
    ) -> None:
        self._ledger.release(booking, now, done=done, used=used)
        self._fleet.pools[booking.model].dirty = True


def _expected(booking: Booking) -> float:
    """What its tenant was charged, which stands where nobody tells what was used."""
    return 0 if booking.charge is None else booking.charge.tokens

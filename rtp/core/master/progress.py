"""What workers tell of granted requests, first tokens and ends, and what that teaches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rtp.core.commands import Command
from rtp.core.kernels import kernel
from rtp.core.master.booking import Booking
from rtp.core.master.columns import COLUMN
from rtp.core.master.fleet import Fleet
from rtp.core.master.ledger import Ledger
from rtp.core.master.members import Member
from rtp.core.master.pool import Pool
from rtp.core.master.ranks import Ranks
from rtp.core.master.totals import Totals
from rtp.core.messages import Finished, FirstToken
from rtp.core.types import IntArray, RequestId

PREFILL, ROWS = COLUMN["prefill_tokens"], COLUMN["decode_rows"]
CONTEXT, STEP_US = COLUMN["context_tokens"], COLUMN["step_us"]


@kernel("i8(Array(i8, 2, 'C', readonly=True), Array(i8, 2, 'C', readonly=True))")
def _decode_step(before: IntArray, table: IntArray) -> int:
    """The first rank whose step, between two tables of a worker, was a new one of decode rows
    alone; -1: none was."""
    for rank in range(len(table)):
        batch = table[rank, ROWS]
        if (
            batch > 0
            and batch == before[rank, ROWS]
            and table[rank, PREFILL] == 0
            and before[rank, PREFILL] == 0
            and table[rank, CONTEXT] > before[rank, CONTEXT]
        ):
            return rank
    return -1


class Progress:
    """Repeats, and news of requests that ended here before, change nothing."""

    def __init__(self, ranks: Ranks, ledger: Ledger, fleet: Fleet, totals: Totals) -> None:
        self._ranks = ranks
        self._ledger = ledger
        self._fleet = fleet
        self._totals = totals

    def news(
        self,
        member: Member,
        first_tokens: Iterable[FirstToken],
        finished: Iterable[Finished],
        now: float,
        *,
        early: bool = False,
    ) -> list[Command]:
        """early: told before the Status that shows the ranks as they are with it. A rank that
        rejects gets nothing until that Status shows what it can take (W07)."""
        out: list[Command] = []
        for first in first_tokens:
            booking = self._booking(member, first)
            if booking is not None and not (booking.first_token or booking.prefill):
                booking.first_token = True
                self._first_token(member, booking, first, now)
        for end in finished:
            booking = self._booking(member, end)
            if booking is not None:
                if early and end.reason == "rejected":
                    self._ranks.refuse(booking.row)
                out += self._finished(member, booking, end, now)
        return out

    def parked(self, member: Member, request_ids: Sequence[RequestId]) -> None:
        """Which of its requests wait for slow readers now. A grant not seen is another attempt."""
        if not (request_ids or member.parked):
            return
        found = (self._ledger.find(request_id) for request_id in request_ids)
        now = {
            booking.grant.request_id: booking
            for booking in found
            if booking is not None and booking.seen and booking.grant.worker_id == member.worker_id
        }
        for request_id, booking in member.parked.items():
            if booking.open and request_id not in now:
                self._ranks.park(booking, False)
        for booking in now.values():
            self._ranks.park(booking, True)
        member.parked = now

    def step(self, member: Member, table: IntArray) -> None:
        """Learns a decode step from one rank of a Status, before its table replaces the last one.

        The step was a pure one if no prompt was under way at either end, and is new if the decode
        rows' context grew: an idle beat tells of the same step again.
        """
        rank = -1 if member.table is None else _decode_step(member.table, table)
        if rank >= 0:
            batch, context = table.item(rank, ROWS), table.item(rank, CONTEXT)
            member.hardware.observe_decode(batch, context, table.item(rank, STEP_US) * 1e-6)
            self._fleet.learned(member)

    def _booking(self, member: Member, item: FirstToken | Finished) -> Booking | None:
        """What of the request is booked on this life of a worker: the grant, or what it reserves
        for later."""
        booking = self._ledger.find(item.request_id, item.attempt)
        if booking is None:
            return None  # nearly always where a Status repeats it
        life = member.register
        while booking is not None and (
            booking.grant.worker_id != life.worker_id or booking.grant.epoch != life.epoch
        ):
            booking = booking.decode
        return booking

    def _first_token(self, member: Member, booking: Booking, first: FirstToken, now: float) -> None:
        totals, pool = self._totals, self._pool(booking)
        booking.computed_tokens = first.new_tokens
        self._ranks.prompt_done(booking)
        totals.prompt_tokens += first.new_tokens + first.cached_tokens
        totals.predicted_hit_tokens += booking.grant.matched_tokens
        totals.hit_tokens += first.cached_tokens
        if booking.grant.matched_tokens and not first.cached_tokens:
            totals.missed_predictions += 1
        if first.new_tokens > 0:
            member.hardware.observe_prefill(first.new_tokens, first.cached_tokens, first.prefill_s)
            self._fleet.learned(member)
        # What is left of the time since the grant is the way there and back, not work or queue.
        gap_s = now - booking.granted_at - first.prefill_s - first.queue_s
        if gap_s > 0:
            pool.lead.observe(gap_s)

    def _finished(
        self, member: Member, booking: Booking, end: Finished, now: float
    ) -> list[Command]:
        handed = end.reason == "handed_over"
        if handed and booking.decode is not None:
            self._ledger.hand_over(booking, now)
            self._totals.handovers += 1
            return []
        if booking.prefill is not None:  # it is through before its prefill rank has told
            self._ledger.hand_over(booking.prefill, now)
            self._totals.handovers += 1
        done = end.reason == "done"
        generated = end.generated + (booking.choices if booking.handed else 0)
        if not handed:  # else nobody waits for it: its frontend asks anew
            known = end.reason in self._totals.finished
            self._totals.finished[end.reason if known else "failed"] += 1
        if done:
            pool = self._pool(booking)
            pool.outputs.observe(booking.tenant, generated / max(1, booking.choices))
        elif end.reason in ("rejected", "failed"):
            member.num_failures += 1
        ran = done or handed or end.reason == "cancelled"
        computed = booking.computed_tokens
        if not booking.handed:
            computed = max(computed, end.prompt_tokens - end.cached_tokens)
        used = computed + generated if ran else 0
        self._ledger.release(booking, now, done=done or handed, used=used)
        if booking.decode is None:
            return []
        grant = booking.decode.grant
        return self._fleet.count(grant) if done else self._fleet.fence(grant)

    def _pool(self, booking: Booking) -> Pool:
        return self._fleet.pools[booking.model]

"""Load of every rank as columns, and the ledger: what a grant charges, when it goes back.

    load of a rank = what its last Status said + every grant whose number that Status has not seen

Each grant is one Booking. It charges its uncached prompt tokens until it is seen (from then on the
worker's own numbers contain it), and reserves its expected output until it ends. Both hang on the
one object and go back once, however the request ends; check() recounts. A split request has two,
one of them for the rank where it goes on: that reserves pages, and is no prefill work.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from rtp.core.errors import IllegalMove
from rtp.core.master import load
from rtp.core.master.booking import Booking
from rtp.core.master.columns import (
    BUDGET,
    BUSY_UNTIL,
    CHARGED_REQUESTS,
    CHARGED_TOKENS,
    HELD,
    HELD_S,
    KV_FREE,
    KV_TOTAL,
    MASK,
    MIXED,
    MOST_REQUESTS,
    NEXT_NUMBER,
    NUM_COLUMNS,
    NUM_REPORTED,
    NUM_UNSEEN,
    PARKED,
    PROMPT_S,
    PROMPT_TOKENS,
    REFUSED,
    REPORTED_AT,
    RESERVED,
    SEEN_UPTO,
    UPTO,
    Rows,
)
from rtp.core.master.load import MASK_BITS, MOST_HELD
from rtp.core.master.predictor import NUM_COEFFICIENTS
from rtp.core.types import FloatArray, IntArray

ROWS_AHEAD = 16
"""A rank may have one request more than it has rows, and one for so many rows: the next ones are
there when a row ends, the others wait where they can still go to another rank."""


class Ranks:
    """One row per rank. Rows of ranks that left are reused, longest unused first."""

    def __init__(self, capacity: int, *, corrected: bool = True, first_number: int = 0) -> None:
        """corrected: by what ranks report; else what was predicted at the grant stands.
        first_number: of the grants of a rank."""
        self.capacity = capacity
        self._corrected = corrected
        self.table: FloatArray = np.zeros((capacity, NUM_COLUMNS))
        """Reported and own facts of each rank (core/master/columns)."""
        self.stale = np.ones(capacity, dtype=np.bool_)
        """Rows that changed since a View read them. Whoever writes to the table says so here."""
        columns = self.table.T
        self.reported = columns[:NUM_REPORTED]
        self.charged_tokens = columns[CHARGED_TOKENS]
        self.charged_requests = columns[CHARGED_REQUESTS]
        self.reserved_tokens = columns[RESERVED]
        self.parked_requests = columns[PARKED]
        self.held, self.held_s = columns[HELD], columns[HELD_S]
        self.busy_until = columns[BUSY_UNTIL]
        self.next_number, self.seen_upto = columns[NEXT_NUMBER], columns[SEEN_UPTO]
        self.reported_at = columns[REPORTED_AT]
        columns[BUDGET] = 1
        columns[MOST_REQUESTS] = np.inf
        columns[SEEN_UPTO] = -1
        columns[REPORTED_AT] = -np.inf
        self.classes = np.zeros(capacity, dtype=np.int64)
        """Hardware class of each row, an index into `profiles`."""
        self.profiles = np.zeros((capacity + 1, NUM_COEFFICIENTS))
        """What the predictor knows of each hardware class, which writes it itself; never more
        classes than ranks, and a new one."""
        self.groups: dict[int, IntArray] = {}
        """Of each row whose rank steps together with others: all of them."""
        self._open: list[dict[int, Booking]] = [{} for _ in range(capacity)]
        self._unseen: list[dict[int, Booking]] = [{} for _ in range(capacity)]
        self._free = deque(range(capacity))
        self._num_external = 0
        self._first_number = first_number
        """Of a worker that comes now: over all that its rows, or another registration of the same
        life, ever had. What was granted before may still reach the worker, and is not this."""

    # ------------------------------------------------------------ rows

    def take(self, kv_total: tuple[int, ...], budget: int, max_rows: int = 0) -> IntArray | None:
        """Rows for a worker's ranks, empty and idle; None when the table is full."""
        if len(kv_total) > len(self._free):
            return None
        rows = np.array([self._free.popleft() for _ in kv_total], dtype=np.int64)
        self.table[rows, :NUM_REPORTED] = 0
        self.table[rows, KV_FREE] = kv_total
        self.table[rows, KV_TOTAL] = kv_total
        self.table[rows, BUSY_UNTIL] = 0
        self.table[rows, BUDGET] = budget
        self.table[rows, NEXT_NUMBER] = self._first_number
        self.table[rows, SEEN_UPTO] = self._first_number - 1
        most = max_rows + 1 + max_rows // ROWS_AHEAD if max_rows else np.inf
        self.table[rows, MOST_REQUESTS] = most
        self.table[rows, REFUSED] = 0
        self.table[rows, PROMPT_TOKENS] = self.table[rows, PROMPT_S] = 0
        self.table[rows, REPORTED_AT] = -np.inf
        self.stale[rows] = True
        return rows

    def join(self, rows: IntArray) -> None:
        """These ranks step together: they are busy until the last of them is free."""
        self.groups |= dict.fromkeys(rows.tolist(), rows)

    def give_back(self, rows: IntArray) -> None:
        """The worker is gone; its bookings were released before."""
        for row in rows.tolist():
            if self._open[row]:
                raise IllegalMove(f"row {row} leaves with open bookings")
            self.groups.pop(row, None)
            self._first_number = max(self._first_number, int(self.next_number[row]))
            self._free.append(row)

    @property
    def num_bookings(self) -> int:
        """On all ranks. O(ranks)."""
        return sum(len(opened) for opened in self._open)

    def bookings(self, row: int) -> list[Booking]:
        """Open bookings of a rank, in the order of their grants."""
        return list(self._open[row].values())

    # ------------------------------------------------------------ the ledger

    def charge(self, booking: Booking) -> None:
        """Takes the grant's load; its number is grant.number == next_number of the row."""
        row, number = booking.row, booking.grant.number
        tokens, reserved = booking.new_tokens, booking.reserved_tokens
        charged = load.charge(
            self.table, row, number, tokens, reserved, booking.prefill_s, booking.granted_at
        )
        if not charged:
            raise IllegalMove(f"grant {number} on row {row} is out of order")
        if not booking.external:
            self._unseen[row][number] = booking
        self._open[row][number] = booking
        self.stale[row] = True
        if self.groups:
            self._busy_together(row)

    def release(self, booking: Booking) -> None:
        """Gives back whatever the booking still holds. Once: raises IllegalMove the second time."""
        if not booking.open:
            raise IllegalMove(f"{booking.grant.request_id} was released before")
        booking.open = False
        self.prompt_done(booking)
        row = booking.row
        del self._open[row][booking.grant.number]
        self.park(booking, False)
        if booking.seen:
            self.reserved_tokens[row] -= booking.reserved_tokens
        else:
            self._uncharge(booking, booking.reserved_tokens, self._less_busy_s(booking))
        self.stale[row] = True

    def prompt_done(self, booking: Booking) -> None:
        """Its prompt is computed, or never will be."""
        if booking.prompt_due:
            booking.prompt_due = False
            load.prompt_done(self.table, booking.row, booking.new_tokens, booking.prefill_s)

    def external_number(self) -> int:
        """For a grant that nobody submits: below 0, so that no rank waits for it to be seen."""
        self._num_external += 1
        return -self._num_external

    def prefilled(self, booking: Booking, *, early: bool) -> None:
        """An external one's prompt is no work any more, but lies in pages until the end. early:
        before the time it was predicted to take had passed."""
        self.prompt_done(booking)
        row, tokens = booking.row, booking.new_tokens
        self.charged_tokens[row] -= tokens
        self.reserved_tokens[row] += tokens
        self.stale[row] = True
        booking.reserved_tokens += tokens
        if early:
            self.busy_until[row] -= self._less_busy_s(booking)
        booking.new_tokens, booking.prefill_s = 0, 0.0

    def park(self, booking: Booking, parked: bool) -> None:
        """Its reservation goes while it is parked, and comes back."""
        if parked != booking.parked:
            booking.parked = parked
            sign = 1 if parked else -1
            self.parked_requests[booking.row] += sign
            self.reserved_tokens[booking.row] -= sign * booking.reserved_tokens
            self.stale[booking.row] = True

    def report(self, rows: IntArray, told: IntArray, now: float) -> None:
        """A worker's Status: rows [R] of its ranks, told [R, len(STATUS_COLUMNS)].

        Settles every grant whose number it has seen, takes in its columns and predicts anew when
        the prefill work of each of these ranks ends.
        """
        if load.any_unseen(self.table, rows):
            for rank, row in enumerate(rows.tolist()):
                if self._unseen[row]:
                    self._see(row, told.item(rank, UPTO), told.item(rank, MASK))
        predicted = None if self._corrected else self.busy_until[rows]
        load.take_in(self.table, self.stale, self.classes, self.profiles, rows, told, now)
        if predicted is not None:
            self.busy_until[rows] = predicted
        if self.groups:
            self._busy_together(rows.item(0))

    def refuse(self, row: int) -> None:
        """The rank rejected a grant: it gets none before its next report."""
        self.table[row, REFUSED] = 1
        self.stale[row] = True

    def begin_numbers(self, rows: IntArray, table: IntArray) -> None:
        """The first word of a life of a worker: numbers begin behind all that it can have seen or
        be sent, where an earlier Master's are as high (its clock was set back). table: as told."""
        behind = table[:, UPTO] + 1 + MASK_BITS
        higher = behind > self.next_number[rows]
        self.next_number[rows[higher]] = behind[higher]
        self.seen_upto[rows[higher]] = behind[higher] - 1
        self.stale[rows] = True

    def lost_numbers(self, rows: IntArray, table: IntArray) -> list[tuple[int, int]]:
        """(rank, number) of those that the worker has not seen and of which no grant is open: their
        fences were lost with a link, and its Status cannot count past them. table: as told."""
        lost = []
        for rank, row in enumerate(rows.tolist()):
            upto, unseen = table.item(rank, UPTO), self._unseen[row]
            mask = table.item(rank, MASK) & (1 << MASK_BITS) - 1
            first = int(max(self.seen_upto[row], upto)) + 1
            lost += [
                (rank, number)
                for number in range(first, int(self.next_number[row]))
                if not mask >> number - upto - 1 & 1 and number not in unseen
            ]
        return lost

    def hold(self, row: int, seconds: float) -> None:
        """A waiting request wants this rank once it is free."""
        self.held[row] += 1
        self.held_s[row] += seconds
        self.stale[row] = True

    def let_go(self, row: int, seconds: float) -> None:
        self.held[row] -= 1
        self.held_s[row] = self.held_s[row] - seconds if self.held[row] else 0.0
        self.stale[row] = True

    # ------------------------------------------------------------ columns

    def busy_s(self, at: Rows, now: float) -> FloatArray:
        """[R] seconds until the prefill work of each ends; negative where it has."""
        return at.of(self.busy_until) - now

    def coefficients(self, at: Rows) -> FloatArray:
        """[6, R] of the predictor; [6, 1] where all ranks are of one hardware class."""
        if at.hardware != MIXED:
            return self.profiles[at.hardware, :, None]
        return np.ascontiguousarray(self.profiles[self.classes[at.array]].T)

    def _less_busy_s(self, booking: Booking) -> float:
        """Seconds of work that was charged and will not be done. In a group other ranks' may last
        as long: the next report tells."""
        return 0.0 if booking.row in self.groups else booking.prefill_s

    def _busy_together(self, row: int) -> None:
        group = self.groups.get(row)
        if group is not None:
            self.busy_until[group] = self.busy_until[group].max()
            self.stale[group] = True

    def _see(self, row: int, upto: int, mask: int) -> None:
        """A report has seen these numbers."""
        unseen = self._unseen[row]
        for booking in [
            booking
            for number, booking in unseen.items()
            if number <= upto or (number - upto <= MASK_BITS and mask >> number - upto - 1 & 1)
        ]:
            booking.seen = True
            self._uncharge(booking, booking.coming_tokens, 0.0)
            booking.reserved_tokens -= booking.coming_tokens
            booking.coming_tokens = 0

    def _uncharge(self, booking: Booking, reserved_tokens: int, busy_s: float) -> None:
        row, numbered = booking.row, not booking.external
        if numbered:
            del self._unseen[row][booking.grant.number]
        load.give_back(self.table, row, numbered, booking.new_tokens, reserved_tokens, busy_s)

    # ------------------------------------------------------------ for tests and chaos runs

    def idle(self) -> bool:
        """Nothing is charged, reserved or held anywhere."""
        columns = (self.charged_tokens, self.charged_requests, self.reserved_tokens, self.held)
        return not any(self._open) and not any(column.any() for column in columns)

    def check(self) -> None:
        """Asserts that the columns are the sums over open bookings. O(ranks + bookings)."""
        sums = np.zeros((self.capacity, 6))
        for row, opened in enumerate(self._open):
            unseen = self._unseen[row]
            if not (opened or unseen):
                continue
            assert all(b.open and b.row == row for b in opened.values())
            charged = [b for b in opened.values() if not b.seen]
            assert unseen == {b.grant.number: b for b in charged if not b.external}
            sums[row] = (
                len(unseen),
                sum(b.new_tokens for b in charged),
                len(charged),
                sum(b.reserved_tokens for b in opened.values() if not b.parked),
                sum(b.parked for b in opened.values()),
                sum(b.new_tokens for b in opened.values() if b.prompt_due),
            )
        columns = [NUM_UNSEEN, CHARGED_TOKENS, CHARGED_REQUESTS, RESERVED, PARKED, PROMPT_TOKENS]
        assert (self.table[:, columns] == sums).all()
        assert (self.held >= 0).all()
        assert (self.held <= MOST_HELD).all()
        for group in self.groups.values():
            assert len(set(self.busy_until[group].tolist())) == 1

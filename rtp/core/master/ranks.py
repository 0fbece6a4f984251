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
from rtp.core.master.booking import Booking
from rtp.core.master.columns import COLUMN, MIXED, NUM_REPORTED, Rows
from rtp.core.master.predictor import (
    NUM_COEFFICIENTS,
    HardwareClass,
    decode_seconds,
    prefill_seconds,
)
from rtp.core.master.view import MASK_BITS, MOST_HELD, View
from rtp.core.types import FloatArray, IntArray

UPTO, MASK = COLUMN["granted_upto"], COLUMN["granted_mask"]
ROWS_AHEAD = 16
"""A rank may have one request more than it has rows, and one for so many rows: the next ones are
there when a row ends, the others wait where they can still go to another rank."""


class Ranks:
    """One row per rank. Rows of ranks that left are reused, longest unused first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reported = np.zeros((NUM_REPORTED, capacity))
        self.charged_tokens = np.zeros(capacity)
        self.charged_requests = np.zeros(capacity)
        self.reserved_tokens = np.zeros(capacity)
        self.held = np.zeros(capacity)
        self.held_s = np.zeros(capacity)
        self.busy_until = np.zeros(capacity)
        self.budget = np.ones(capacity)
        self.classes = np.zeros(capacity, dtype=np.int64)
        """Hardware class of each row, an index into `profiles`."""
        self._profiles = np.zeros((capacity + 1, NUM_COEFFICIENTS))
        self._learned: dict[int, HardwareClass] = {}
        self.next_number = np.zeros(capacity, dtype=np.int64)
        self.seen_upto = np.full(capacity, -1, dtype=np.int64)
        self.most_requests = np.full(capacity, np.inf)
        self.parked_requests = np.zeros(capacity)
        self.refused = np.zeros(capacity, dtype=np.bool_)
        self.reported_at = np.full(capacity, -np.inf)
        self.groups: dict[int, IntArray] = {}
        """Of each row whose rank steps together with others: all of them."""
        self._reports: list[tuple[IntArray, IntArray, float]] = []
        self._open: list[dict[int, Booking]] = [{} for _ in range(capacity)]
        self._unseen: list[dict[int, Booking]] = [{} for _ in range(capacity)]
        self._free = deque(range(capacity))
        self._num_external = 0

    # ------------------------------------------------------------ rows

    def take(self, kv_total: tuple[int, ...], budget: int, max_rows: int = 0) -> IntArray | None:
        """Rows for a worker's ranks, empty and idle; None when the table is full."""
        if len(kv_total) > len(self._free):
            return None
        self.settle_reports()
        rows = np.array([self._free.popleft() for _ in kv_total], dtype=np.int64)
        self.reported[:, rows] = 0
        self.reported[COLUMN["kv_free"], rows] = kv_total
        self.reported[COLUMN["kv_total"], rows] = kv_total
        self.busy_until[rows] = 0
        self.budget[rows] = budget
        self.next_number[rows] = 0
        self.seen_upto[rows] = -1
        self.most_requests[rows] = max_rows + 1 + max_rows // ROWS_AHEAD if max_rows else np.inf
        self.refused[rows] = False
        self.reported_at[rows] = -np.inf
        return rows

    def join(self, rows: IntArray) -> None:
        """These ranks step together: they are busy until the last of them is free."""
        self.groups |= dict.fromkeys(rows.tolist(), rows)

    def give_back(self, rows: IntArray) -> None:
        """The worker is gone; its bookings were released before."""
        self.settle_reports()
        for row in rows.tolist():
            if self._open[row]:
                raise IllegalMove(f"row {row} leaves with open bookings")
            self.groups.pop(row, None)
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
        if not booking.external:
            if number != self.next_number[row]:
                raise IllegalMove(f"grant {number} on row {row} is out of order")
            self.next_number[row] += 1
            self._unseen[row][number] = booking
        self._open[row][number] = booking
        self.charged_tokens[row] += booking.new_tokens
        self.charged_requests[row] += 1
        self.reserved_tokens[row] += booking.reserved_tokens
        self.busy_until[row] = max(self.busy_until[row], booking.granted_at) + booking.prefill_s
        if self.groups:
            self._busy_together(row)

    def release(self, booking: Booking) -> None:
        """Gives back whatever the booking still holds. Once: raises IllegalMove the second time."""
        if not booking.open:
            raise IllegalMove(f"{booking.grant.request_id} was released before")
        booking.open = False
        row = booking.row
        del self._open[row][booking.grant.number]
        if not booking.seen:
            self.settle_reports()
            self._uncharge(booking)
            self._less_busy(row, booking.prefill_s)
        self.park(booking, False)
        self.reserved_tokens[row] -= booking.reserved_tokens

    def external_number(self) -> int:
        """For a grant that nobody submits: below 0, so that no rank waits for it to be seen."""
        self._num_external += 1
        return -self._num_external

    def prefilled(self, booking: Booking, *, early: bool) -> None:
        """An external one's prompt is no work any more, but lies in pages until the end. early:
        before the time it was predicted to take had passed."""
        self.settle_reports()
        row, tokens = booking.row, booking.new_tokens
        self.charged_tokens[row] -= tokens
        self.reserved_tokens[row] += tokens
        booking.reserved_tokens += tokens
        if early:
            self._less_busy(row, booking.prefill_s)
        booking.new_tokens, booking.prefill_s = 0, 0.0

    def park(self, booking: Booking, parked: bool) -> None:
        """Its reservation goes while it is parked, and comes back."""
        if parked != booking.parked:
            booking.parked = parked
            sign = 1 if parked else -1
            self.parked_requests[booking.row] += sign
            self.reserved_tokens[booking.row] -= sign * booking.reserved_tokens

    def report(self, rows: IntArray, table: IntArray, now: float) -> None:
        """A worker's Status: rows [R] of its ranks, table [R, len(STATUS_COLUMNS)].

        Settles every grant whose number it has seen. The columns follow in settle_reports(), for
        all reports of a turn together: one by one they would cost as many array calls each.
        """
        seen = table[:, UPTO].tolist()
        for rank, row in enumerate(rows.tolist()):
            if self._unseen[row]:
                self._see(row, seen[rank], int(table[rank, MASK]))
        self._reports.append((rows, table, now))

    def settle_reports(self) -> None:
        """Takes in the columns of what was reported, then predicts anew when each of these ranks'
        prefill work ends. Whoever reads columns calls it first; 30 array calls if there is news."""
        if not self._reports:
            return
        reports, self._reports = self._reports, []
        rows = np.concatenate([rows for rows, _, _ in reports])
        table = np.concatenate([table for _, table, _ in reports])
        at = np.repeat([at for _, _, at in reports], [len(rows) for rows, _, _ in reports])
        self.reported[:, rows] = table[:, :NUM_REPORTED].T
        self.refused[rows] = False
        self.reported_at[rows] = at
        self.seen_upto[rows] = table[:, UPTO]
        self.busy_until[rows] = at + self._work_s(rows)
        if self.groups:
            for rows, _, _ in reports:
                self._busy_together(int(rows[0]))

    def refuse(self, row: int) -> None:
        """The rank rejected a grant: it gets none before its next report."""
        self.settle_reports()
        self.refused[row] = True

    def resume_numbers(self, rows: IntArray, table: IntArray) -> list[tuple[int, int]]:
        """Numbers go on behind those another Master gave this life of the worker.

        Returns (rank, number) of gaps: grants that never reached the worker and must be fenced, or
        its Status could not count past them.
        """
        gaps = []
        for rank, row in enumerate(rows.tolist()):
            upto = int(table[rank, UPTO])
            mask = int(table[rank, MASK]) & (1 << MASK_BITS) - 1
            top = mask.bit_length()
            gaps += [(rank, upto + 1 + i) for i in range(top) if not mask >> i & 1]
            self.next_number[row] = max(self.next_number[row], upto + 1 + top)
        return gaps

    def hold(self, row: int, seconds: float) -> None:
        """A waiting request wants this rank once it is free."""
        self.held[row] += 1
        self.held_s[row] += seconds

    def let_go(self, row: int, seconds: float) -> None:
        self.held[row] -= 1
        self.held_s[row] = self.held_s[row] - seconds if self.held[row] else 0.0

    # ------------------------------------------------------------ columns

    @property
    def profiles(self) -> FloatArray:
        """[classes, 6]: what the predictor knows of each hardware class; never more classes than
        ranks, and a new one."""
        for index, hardware in self._learned.items():
            self._profiles[index] = hardware.coefficients
        self._learned.clear()
        return self._profiles

    def learned(self, hardware: HardwareClass) -> None:
        """Its coefficients are not as they were. They are asked for when somebody reads: samples
        come more often."""
        self._learned[hardware.index] = hardware

    def view(self, at: Rows, now: float, lead_s: float) -> View:
        """What these ranks look like now."""
        self.settle_reports()
        return View(self, at, now, lead_s)

    def busy_s(self, at: Rows, now: float) -> FloatArray:
        """[R] seconds until the prefill work of each ends; negative where it has."""
        self.settle_reports()
        return at.of(self.busy_until) - now

    def coefficients(self, at: Rows) -> FloatArray:
        """[6, R] of the predictor; [6, 1] where all ranks are of one hardware class."""
        if at.hardware != MIXED:
            return self.profiles[at.hardware, :, None]
        return np.ascontiguousarray(self.profiles[self.classes[at.array]].T)

    def _less_busy(self, row: int, seconds: float) -> None:
        """Work that was charged will not be done. In a group other ranks' may last as long: the
        next report tells."""
        if row not in self.groups:
            self.busy_until[row] -= seconds

    def _busy_together(self, row: int) -> None:
        group = self.groups.get(row)
        if group is not None:
            self.busy_until[group] = self.busy_until[group].max()

    def _work_s(self, rows: IntArray) -> FloatArray:
        """Seconds until the prefill work of each rank ends: tokens left over tokens per second, in
        chunks of what the step budget leaves beside the decode rows, less what the step in flight
        has run already."""
        reported, coefficients = self.reported[:, rows], self.profiles[self.classes[rows]].T
        tokens = reported[COLUMN["prefill_tokens"]] + self.charged_tokens[rows]
        batch = reported[COLUMN["decode_rows"]]
        age_s = 1e-6 * reported[COLUMN["step_age_us"]]
        chunk = np.maximum(np.minimum(tokens, self.budget[rows] - batch), 1.0)
        step = prefill_seconds(coefficients, chunk, np.zeros(1)) + np.where(
            batch > 0,
            decode_seconds(coefficients, batch, reported[COLUMN["context_tokens"]]),
            0.0,
        )
        return np.asarray(
            tokens / chunk * step - np.where(tokens > 0, np.minimum(age_s, step), 0.0)
        )

    def _see(self, row: int, upto: int, mask: int) -> None:
        """A report has seen these numbers."""
        unseen = self._unseen[row]
        for booking in [
            booking
            for number, booking in unseen.items()
            if number <= upto or (number - upto <= MASK_BITS and mask >> number - upto - 1 & 1)
        ]:
            booking.seen = True
            self._uncharge(booking)

    def _uncharge(self, booking: Booking) -> None:
        row = booking.row
        if not booking.external:
            del self._unseen[row][booking.grant.number]
        self.charged_tokens[row] -= booking.new_tokens
        self.charged_requests[row] -= 1
        if booking.coming_tokens:
            self.reserved_tokens[row] -= booking.coming_tokens
            booking.reserved_tokens -= booking.coming_tokens
            booking.coming_tokens = 0

    # ------------------------------------------------------------ for tests and chaos runs

    def idle(self) -> bool:
        """Nothing is charged, reserved or held anywhere."""
        columns = (self.charged_tokens, self.charged_requests, self.reserved_tokens, self.held)
        return not any(self._open) and not any(column.any() for column in columns)

    def check(self) -> None:
        """Asserts that the columns are the sums over open bookings. O(ranks + bookings)."""
        for row in range(self.capacity):
            opened, unseen = self._open[row], self._unseen[row]
            assert all(b.open and b.row == row for b in opened.values())
            charged = [b for b in opened.values() if not b.seen]
            assert unseen == {b.grant.number: b for b in charged if not b.external}
            assert self.charged_tokens[row] == sum(b.new_tokens for b in charged)
            assert self.charged_requests[row] == len(charged)
            assert self.reserved_tokens[row] == sum(
                b.reserved_tokens for b in opened.values() if not b.parked
            )
            assert self.parked_requests[row] == sum(b.parked for b in opened.values())
            assert 0 <= self.held[row] <= MOST_HELD
        for group in self.groups.values():
            assert len(set(self.busy_until[group].tolist())) == 1

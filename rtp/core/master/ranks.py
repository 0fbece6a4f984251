"""Load of every rank as columns, and the ledger: what a grant charges, when it goes back.

    load of a rank = what its last Status said + every grant whose number that Status has not seen

Each grant is one Booking. It charges its uncached prompt tokens until it is seen (from then on the
worker's own numbers contain it), and reserves its expected output until it ends. Both hang on the
one object and go back once, however the request ends; check() recounts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from rtp.core.errors import IllegalMove
from rtp.core.master.predictor import NUM_COEFFICIENTS, decode_seconds, prefill_seconds
from rtp.core.messages import STATUS_COLUMNS, Grant
from rtp.core.types import BoolArray, FloatArray, FrontendId, Hashes, IntArray

NUM_REPORTED = STATUS_COLUMNS.index("granted_upto")
"""Columns of Status.table that are load; the two behind them are about grant numbers."""
COLUMN = {name: i for i, name in enumerate(STATUS_COLUMNS)}
MASK_BITS = 64
ROWS_AHEAD = 16
"""A rank may have one request more than it has rows, and one for so many rows: the next ones are
there when a row ends, the others wait where they can still go to another rank."""
MOST_HELD = 3
"""Requests that may wait for one busy rank. One costs tail latency, many make a herd."""


@dataclass(slots=True, eq=False)
class Booking:
    """One grant, from the decision until the end of the request. Changed by Ranks only."""

    grant: Grant
    row: int
    frontend_id: FrontendId
    model: str
    tenant: str
    choices: int
    hashes: Hashes
    new_tokens: int
    """Prompt tokens to compute; charged until seen."""
    reserved_tokens: int
    """Expected output; reserved until the end."""
    prefill_s: float
    granted_at: float
    arrival: float
    open: bool = True
    seen: bool = False
    first_token: bool = False
    parked: bool = False
    """It waits for a slow reader and holds no pages: nothing is reserved for it meanwhile."""


@dataclass(frozen=True, slots=True)
class View:
    """Columns of some ranks at one instant, own charges included. Length R, rows ascending."""

    rows: IntArray
    busy_s: FloatArray  # predicted prefill work not finished
    wait_s: FloatArray  # until a new prefill could start: busy_s and the requests held for the rank
    prefill_tokens: FloatArray
    num_requests: FloatArray
    decode_rows: FloatArray
    context_tokens: FloatArray
    kv_free: FloatArray
    kv_total: FloatArray
    room: FloatArray  # tokens a further request may need; infinite on a rank without requests
    load: FloatArray  # tokens in play, for ties
    held: FloatArray
    numbered: BoolArray  # a further grant's number would fit the mask of Status
    open: BoolArray  # has not just refused a grant, and has a row for a further request
    reported_at: FloatArray  # when its last Status came
    coefficients: FloatArray  # [6, R]


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
        self.coefficients = np.zeros((NUM_COEFFICIENTS, capacity))
        self.next_number = np.zeros(capacity, dtype=np.int64)
        self.seen_upto = np.full(capacity, -1, dtype=np.int64)
        self.most_requests = np.full(capacity, np.inf)
        self.parked_requests = np.zeros(capacity)
        self.refused = np.zeros(capacity, dtype=np.bool_)
        self.reported_at = np.full(capacity, -np.inf)
        self._open: list[dict[int, Booking]] = [{} for _ in range(capacity)]
        self._unseen: list[dict[int, Booking]] = [{} for _ in range(capacity)]
        self._free = deque(range(capacity))

    # ------------------------------------------------------------ rows

    def take(self, kv_total: tuple[int, ...], budget: int, max_rows: int = 0) -> IntArray | None:
        """Rows for a worker's ranks, empty and idle; None when the table is full."""
        if len(kv_total) > len(self._free):
            return None
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

    def give_back(self, rows: IntArray) -> None:
        """The worker is gone; its bookings were released before."""
        for row in rows.tolist():
            if self._open[row]:
                raise IllegalMove(f"row {row} leaves with open bookings")
            self._free.append(row)

    def bookings(self, row: int) -> list[Booking]:
        """Open bookings of a rank, in the order of their grants."""
        return list(self._open[row].values())

    # ------------------------------------------------------------ the ledger

    def charge(self, booking: Booking) -> None:
        """Takes the grant's load; its number is grant.number == next_number of the row."""
        row, number = booking.row, booking.grant.number
        if number != self.next_number[row]:
            raise IllegalMove(f"grant {number} on row {row} is out of order")
        self.next_number[row] += 1
        self._open[row][number] = self._unseen[row][number] = booking
        self.charged_tokens[row] += booking.new_tokens
        self.charged_requests[row] += 1
        self.reserved_tokens[row] += booking.reserved_tokens
        self.busy_until[row] = max(self.busy_until[row], booking.granted_at) + booking.prefill_s

    def release(self, booking: Booking) -> None:
        """Gives back whatever the booking still holds. Once: raises IllegalMove the second time."""
        if not booking.open:
            raise IllegalMove(f"{booking.grant.request_id} was released before")
        booking.open = False
        row = booking.row
        del self._open[row][booking.grant.number]
        if not booking.seen:
            self._uncharge(booking)
            self.busy_until[row] -= booking.prefill_s
        self.park(booking, False)
        self.reserved_tokens[row] -= booking.reserved_tokens

    def park(self, booking: Booking, parked: bool) -> None:
        """Its reservation goes while it is parked, and comes back."""
        if parked != booking.parked:
            booking.parked = parked
            sign = 1 if parked else -1
            self.parked_requests[booking.row] += sign
            self.reserved_tokens[booking.row] -= sign * booking.reserved_tokens

    def report(self, rows: IntArray, table: IntArray, now: float) -> None:
        """A worker's Status: rows [R] of its ranks, table [R, len(STATUS_COLUMNS)].

        Settles every grant whose number it has seen, then predicts anew when each rank's prefill
        work ends. Constant number of array calls + one step per unseen grant.
        """
        self.reported[:, rows] = table[:, :NUM_REPORTED].T
        self.refused[rows] = False
        self.reported_at[rows] = now
        upto = table[:, COLUMN["granted_upto"]]
        self.seen_upto[rows] = upto
        masks = table[:, COLUMN["granted_mask"]].tolist()
        for row, seen, mask in zip(rows.tolist(), upto.tolist(), masks, strict=True):
            if self._unseen[row]:
                for booking in [
                    booking
                    for number, booking in self._unseen[row].items()
                    if number <= seen
                    or (number - seen <= MASK_BITS and mask >> number - seen - 1 & 1)
                ]:
                    booking.seen = True
                    self._uncharge(booking)
        self.busy_until[rows] = now + self._work_s(rows)

    def resume_numbers(self, rows: IntArray, table: IntArray) -> list[tuple[int, int]]:
        """Numbers go on behind those another Master gave this life of the worker.

        Returns (rank, number) of gaps: grants that never reached the worker and must be fenced, or
        its Status could not count past them.
        """
        gaps = []
        for rank, row in enumerate(rows.tolist()):
            upto = int(table[rank, COLUMN["granted_upto"]])
            mask = int(table[rank, COLUMN["granted_mask"]]) & (1 << MASK_BITS) - 1
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

    def view(self, rows: IntArray, now: float) -> View:
        """What the ranks in `rows` look like now; about 20 array calls."""
        reported = self.reported.take(rows, axis=1)
        charged, requests = self.charged_tokens.take(rows), self.charged_requests.take(rows)
        num_requests = reported[COLUMN["running"]] + reported[COLUMN["waiting"]] + requests
        prefill = reported[COLUMN["prefill_tokens"]] + charged
        expected = prefill + self.reserved_tokens.take(rows)
        kv_free = reported[COLUMN["kv_free"]]
        context = reported[COLUMN["context_tokens"]]
        busy_s = np.maximum(self.busy_until.take(rows) - now, 0.0)
        return View(
            rows=rows,
            busy_s=busy_s,
            wait_s=busy_s + self.held_s.take(rows),
            prefill_tokens=prefill,
            num_requests=num_requests,
            decode_rows=reported[COLUMN["decode_rows"]],
            context_tokens=context,
            kv_free=kv_free,
            kv_total=reported[COLUMN["kv_total"]],
            room=np.where(num_requests == 0, np.inf, kv_free - expected),
            load=expected + context,
            held=self.held.take(rows),
            numbered=self.next_number.take(rows) - self.seen_upto.take(rows) <= MASK_BITS,
            open=~self.refused.take(rows)
            & (num_requests - self.parked_requests.take(rows) < self.most_requests.take(rows)),
            reported_at=self.reported_at.take(rows),
            coefficients=self.coefficients.take(rows, axis=1),
        )

    def _work_s(self, rows: IntArray) -> FloatArray:
        """Seconds until the prefill work of each rank ends: tokens left over tokens per second, in
        chunks of what the step budget leaves beside the decode rows."""
        reported, coefficients = self.reported[:, rows], self.coefficients[:, rows]
        tokens = reported[COLUMN["prefill_tokens"]] + self.charged_tokens[rows]
        batch = reported[COLUMN["decode_rows"]]
        chunk = np.maximum(np.minimum(tokens, self.budget[rows] - batch), 1.0)
        step = prefill_seconds(coefficients, chunk, np.zeros(1)) + np.where(
            batch > 0,
            decode_seconds(coefficients, batch, reported[COLUMN["context_tokens"]]),
            0.0,
        )
        return np.asarray(tokens / chunk * step)

    def _uncharge(self, booking: Booking) -> None:
        row = booking.row
        del self._unseen[row][booking.grant.number]
        self.charged_tokens[row] -= booking.new_tokens
        self.charged_requests[row] -= 1

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
            assert unseen == {n: b for n, b in opened.items() if not b.seen}
            assert self.charged_tokens[row] == sum(b.new_tokens for b in unseen.values())
            assert self.charged_requests[row] == len(unseen)
            assert self.reserved_tokens[row] == sum(
                b.reserved_tokens for b in opened.values() if not b.parked
            )
            assert self.parked_requests[row] == sum(b.parked for b in opened.values())
            assert 0 <= self.held[row] <= MOST_HELD

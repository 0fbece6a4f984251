"""What the ranks of one model look like during a round: columns for the policy and the order.

Made once a round; a row that the round itself charges is read anew, so that the sixteenth decision
of a round costs no more than the first.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from rtp.core.master.columns import COLUMN, Rows
from rtp.core.types import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from rtp.core.master.ranks import Ranks

MASK_BITS = 64
MOST_HELD = 3
"""Requests that may wait for one busy rank. One costs tail latency, many make a herd."""
RUNNING, WAITING, PREFILL = COLUMN["running"], COLUMN["waiting"], COLUMN["prefill_tokens"]
DECODE_ROWS, CONTEXT = COLUMN["decode_rows"], COLUMN["context_tokens"]
KV_FREE, KV_TOTAL = COLUMN["kv_free"], COLUMN["kv_total"]


LOAD = ("wait_s", "prefill_tokens", "num_requests", "decode_rows", "context_tokens")


class View:
    """Columns of some ranks at one instant, own charges included. Length R, rows ascending. Some
    lie in the table itself: to be read only, and only during the round."""

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
    open: BoolArray  # has not just refused a grant, and has a row for a further request
    numbered: BoolArray  # a further grant's number fits the mask of Status
    ready: BoolArray  # open, numbered, and work under the lead
    idle: BoolArray  # ready, and nothing runs, waits or is held there: no rank is better off
    offered: BoolArray  # ready, or open and few enough requests are held for it
    reported_at: FloatArray  # when its last Status came
    coefficients: FloatArray  # [6, R]; [6, 1] where all are equal
    best_room: FloatArray  # of ready ranks; minus infinity elsewhere
    least_room: float  # no rank has less
    num_ready: int  # as the round began
    num_offered: int

    __slots__ = (
        *("rows", "busy_s", "wait_s", "prefill_tokens", "num_requests", "decode_rows"),
        *("context_tokens", "kv_free", "kv_total", "room", "load", "open", "ready"),
        *(
            "idle",
            "touched",
            "num_ready",
            "num_offered",
            "numbered",
            "offered",
            "reported_at",
            "coefficients",
            "best_room",
            "least_room",
        ),
        *("at", "read_only", "_coming", "_lead_s", "_now", "_ranks"),
    )

    def __init__(self, ranks: Ranks, at: Rows, now: float, lead_s: float) -> None:
        """About 25 array calls."""
        self._ranks, self._now, self._lead_s = ranks, now, lead_s
        self.at = at
        self._coming: dict[int, int] = {}
        of, reported = at.of, ranks.reported
        self.rows = at.array
        self.busy_s = np.maximum(of(ranks.busy_until) - now, 0.0)
        self.wait_s = self.busy_s + of(ranks.held_s)
        self.prefill_tokens = of(reported[PREFILL]) + of(ranks.charged_tokens)
        self.num_requests = (
            of(reported[RUNNING]) + of(reported[WAITING]) + of(ranks.charged_requests)
        )
        self.decode_rows = of(reported[DECODE_ROWS])
        self.context_tokens = of(reported[CONTEXT])
        self.kv_free = of(reported[KV_FREE])
        self.kv_total = of(reported[KV_TOTAL])
        expected = self.prefill_tokens + of(ranks.reserved_tokens)
        self.room = self.kv_free - expected
        self.room[self.num_requests == 0] = inf
        self.load = expected + self.context_tokens
        self.open = self.num_requests - of(ranks.parked_requests) < of(ranks.most_requests)
        self.open &= ~of(ranks.refused)
        self.ready = self.open & (self.busy_s < lead_s)
        self.numbered = of(ranks.next_number) - of(ranks.seen_upto) <= MASK_BITS
        self.ready &= self.numbered
        self.idle = self.ready & (self.wait_s == 0) & (self.num_requests == 0)
        self.idle &= self.load == 0
        self.touched: list[int] = []
        """Where rows were read anew, in order."""
        self.offered = of(ranks.held) < MOST_HELD
        self.offered &= self.open
        self.offered |= self.ready
        self.num_ready = int(np.count_nonzero(self.ready))
        self.num_offered = int(np.count_nonzero(self.offered))
        self.best_room = np.where(self.ready, self.room, -inf)
        self.least_room = float(self.room.min(initial=inf))
        self.read_only = [(name, _read_only(getattr(self, name))) for name in LOAD]
        """The columns most policies read, as these may have them."""
        self.reported_at = of(ranks.reported_at)
        self.coefficients = ranks.coefficients(at)

    @property
    def alike(self) -> bool:
        """All ranks take the same time for the same step."""
        return bool(self.coefficients.shape[1] == 1)

    def where(self, row: int) -> int:
        """Where a row of the rank table stands here; -1: it does not."""
        index = self.at.index(row) if row >= 0 else -1
        return index if 0 <= index < len(self.rows) and self.rows.item(index) == row else -1

    def idlest(self, matched: FloatArray, among: BoolArray) -> int:
        """The idle rank of `among` with the longest match, the first of equal ones; -1: none."""
        most = np.where(self.idle & among, matched, -1.0)
        index = int(most.argmax())
        return index if most.item(index) >= 0 else -1

    def expect(self, row: int, tokens: int, choices: int) -> None:
        """A grant is decided on that will reserve so much there: further ones of the same group
        round find it taken. reread() puts the ledger's figures in its place."""
        ranks, i = self._ranks, self.at.index(row)
        room = self.room.item(i)
        self.room[i] = (self.kv_free.item(i) if room == inf else room) - tokens
        self.least_room = min(self.least_room, self.room.item(i))
        self.num_requests[i] += choices
        self.idle[i] = False
        self.touched.append(i)
        coming = self._coming[row] = self._coming.get(row, 0) + 1
        number = ranks.next_number.item(row) + coming
        self.numbered[i] = number - ranks.seen_upto.item(row) <= MASK_BITS

    def reread(self, row: int) -> None:
        """The round charged this row, or holds a request for it: the same formulas once more."""
        self._coming.pop(row, None)
        ranks, i = self._ranks, self.at.index(row)
        reported = ranks.reported
        busy_s = max(ranks.busy_until.item(row) - self._now, 0.0)
        self.busy_s[i] = busy_s
        self.wait_s[i] = busy_s + ranks.held_s.item(row)
        prefill = reported.item(PREFILL, row) + ranks.charged_tokens.item(row)
        self.prefill_tokens[i] = prefill
        requests = reported.item(RUNNING, row) + reported.item(WAITING, row)
        requests += ranks.charged_requests.item(row)
        self.num_requests[i] = requests
        expected = prefill + ranks.reserved_tokens.item(row)
        room = reported.item(KV_FREE, row) - expected if requests else inf
        self.room[i] = room
        self.least_room = min(self.least_room, room)
        self.load[i] = expected + reported.item(CONTEXT, row)
        is_open = requests - ranks.parked_requests.item(row) < ranks.most_requests.item(row)
        is_open = is_open and not ranks.refused.item(row)
        self.open[i] = is_open
        numbered = ranks.next_number.item(row) - ranks.seen_upto.item(row) <= MASK_BITS
        self.numbered[i] = numbered
        ready = is_open and busy_s < self._lead_s and numbered
        self.ready[i] = ready
        self.idle[i] = (
            ready and not requests and self.wait_s.item(i) == 0 and self.load.item(i) == 0
        )
        self.touched.append(i)
        self.best_room[i] = room if ready else -inf
        self.offered[i] = ready or (is_open and ranks.held.item(row) < MOST_HELD)


def _read_only(column: FloatArray) -> FloatArray:
    alias = column[:]
    alias.setflags(write=False)
    return alias

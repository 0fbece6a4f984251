"""One model: its workers, its waiting requests, what was learned of lengths and delays."""

from __future__ import annotations

from math import inf

import numpy as np

from rtp.core.master.columns import NO_ROWS, Rows
from rtp.core.master.members import Member
from rtp.core.master.pairing import Pairs
from rtp.core.master.predictor import NUM_COEFFICIENTS, OutputLengths
from rtp.core.master.ranks import Ranks
from rtp.core.master.roles import decodes, paired, pairs_of
from rtp.core.master.shares import Shares
from rtp.core.master.view import View
from rtp.core.master.window import Waiting, Window
from rtp.core.types import FloatArray, IntArray, RequestId, Role, WorkerId

LEAST_LEAD_S = 0.005
MOST_LEAD_S = 0.25
GAP_SAMPLES = 256
GAPS_PER_UPDATE = 32


class Lead:
    """How long before a rank is free a grant should leave: p99 of the measured gap between grant
    and start of prefill on a free rank, so that ranks do not idle for the round trip. An infinite
    one stays: requests are bound when they arrive, whatever their rank has to do before."""

    def __init__(self, start_s: float) -> None:
        self.seconds = start_s
        self._gaps = np.zeros(GAP_SAMPLES)
        self._num_gaps = 0

    def observe(self, gap_s: float) -> None:
        if self.seconds == inf:
            return
        self._gaps[self._num_gaps % GAP_SAMPLES] = gap_s
        self._num_gaps += 1
        if self._num_gaps % GAPS_PER_UPDATE == 0:
            known = np.sort(self._gaps[: self._num_gaps])
            place, rest = divmod(0.99 * (len(known) - 1), 1)  # np.quantile, ten times as fast
            below, above = known[int(place)], known[int(place) + 1]
            p99 = float(above - (above - below) * (1 - rest))
            self.seconds = min(max(p99, LEAST_LEAD_S), MOST_LEAD_S)


class Pool:
    """Everything of one model. Requests of one model never wait behind those of another."""

    def __init__(
        self, model: str, lead_s: float, shares: Shares | None = None, *, by_age: bool = False
    ) -> None:
        self.model = model
        self.window = Window(shares, by_age=by_age)
        self.outputs = OutputLengths()
        self.lead = Lead(lead_s)
        self.at_once: dict[RequestId, Waiting] = {}
        """Requests that do not wait: the next round places or refuses them. None is in the window,
        whose order and columns are of no use to them."""
        self.members: dict[WorkerId, Member] = {}
        """Those present, with a role that requests are placed by."""
        self.rows: IntArray = NO_ROWS
        """Rows that may get new grants, ascending."""
        self.at = Rows(NO_ROWS, NO_ROWS)
        """The same, to read columns by."""
        self.view: View
        """Of those, for the round."""
        self.pairs: Pairs | None = None
        """How they pair, where there are prefill and decode ranks that can."""
        self.lanes = self.at
        """Those of them that prefills are meant for."""
        self._classes: IntArray = NO_ROWS
        """Hardware classes of all its ranks, and the share of each in them."""
        self._shares: FloatArray = np.zeros(0)
        self.alive = False
        """Somebody may serve this model now or in a moment."""
        self.outside = False
        """Its workers are engines of others, to which no frontend can submit."""
        self.block_size = 0
        self.max_model_len = 0
        self.kv_total = 0.0
        """The largest of any rank, tokens."""
        self.coefficients = (0.0,) * NUM_COEFFICIENTS
        """Mean of its ranks, for estimates before a rank is chosen."""
        self.num_held_back = 0
        """Looks and rounds that left requests waiting, for want of headroom on any decode rank."""
        self.reserved: tuple[int, Waiting] | None = None
        """A rank kept from others until an overdue request fits on it."""
        self.dirty = False
        """Something changed since the last round."""
        self.next_round = inf
        """When time alone makes a round worth while."""

    @property
    def wants_round(self) -> bool:
        return self.dirty and (self.window.num_waiting > 0 or bool(self.at_once))

    def refresh(self, ranks: Ranks) -> None:
        """Membership or a member's state changed: works out the rows anew. O(workers)."""
        members = list(self.members.values())
        usable = [m for m in members if m.usable]
        if any(m.register.role is not Role.FUSION for m in usable):
            usable = paired(usable)
        self.rows = np.sort(np.concatenate([m.rows for m in usable])) if usable else NO_ROWS
        self.at = self.lanes = Rows(self.rows, ranks.classes[self.rows])
        self.view = View(ranks, self.at)
        self.pairs = None
        if any(m.register.role is Role.PREFILL for m in usable):
            self.pairs, lanes = pairs_of(usable)
            self.lanes = Rows(lanes, ranks.classes[lanes])
        self.window.splits = self.pairs is not None
        whole = [m for m in members if decodes(m)]
        self.alive = any(not m.draining for m in whole)
        if whole:
            self.outside = members[0].outside  # kv_format keeps them apart from others
            self.block_size = members[0].register.block_size
            self.max_model_len = max(m.register.max_model_len for m in whole)
            self.kv_total = float(max(max(m.register.kv_total) for m in whole))
            classes = ranks.classes[np.concatenate([m.rows for m in members])]
            self._classes, counts = np.unique(classes, return_counts=True)
            self._shares = counts / len(classes)
            self.learn(ranks)
        if self.reserved and self.reserved[0] not in self.rows:
            self.reserved = None
        usable_rows = set(self.rows.tolist())
        for row in self.window.rows_with_held():
            if row not in usable_rows:
                for waiting in self.window.held_on(row):
                    self.let_go(waiting, ranks)
        self.dirty = True

    def learn(self, ranks: Ranks) -> None:
        """Takes in what the predictor learned of its ranks."""
        self.coefficients = tuple((self._shares @ ranks.profiles[self._classes]).tolist())

    def prefill_s(self, new: int, cached: int) -> float:
        """Of so many new tokens behind so many cached ones, predicted."""
        a, b, c, *_ = self.coefficients
        return a + new * (b + c * (cached + 0.5 * new))

    def decode_s(self, context: int, output: int) -> float:
        """What so many output tokens behind so much context add to its ranks' steps, predicted."""
        *_, e, f = self.coefficients
        return output * (e + f * context)

    def backlog_s(self, waiting: Waiting) -> float:
        """Predicted prefill seconds of all others that wait, over the ranks that prefill."""
        own_s = 0.0 if waiting.ask.at_once else waiting.service_s
        return max(self.window.service_s - own_s, 0.0) / max(len(self.lanes), 1)

    def let_go(self, waiting: Waiting, ranks: Ranks) -> None:
        """A held request competes again."""
        if waiting.held_row >= 0:
            ranks.let_go(waiting.held_row, waiting.held_s)
            self.window.let_go(waiting)

    def withdraw(self, waiting: Waiting, ranks: Ranks) -> None:
        """The request waits no longer."""
        self.dirty = True
        if waiting.ask.at_once:
            del self.at_once[waiting.ask.request_id]
            return
        self.let_go(waiting, ranks)
        self.window.remove(waiting)
        if self.reserved and self.reserved[1] is waiting:
            self.reserved = None

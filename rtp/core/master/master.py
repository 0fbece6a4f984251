"""The Master: who may run what, where and when. Events in, commands out; it never asks the time.

Reports and requests change state; decisions are made in the Tick that ends a turn (protocol rule
1), so production, replay and tests decide at the same points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from rtp.core.commands import Command
from rtp.core.errors import ConfigError
from rtp.core.events import Event, From, FrontendDown, FrontendUp, LinkDown, LinkUp, LoopBusy, Tick
from rtp.core.master.admission import Admission
from rtp.core.master.affinity import Affinity
from rtp.core.master.booking import Booking
from rtp.core.master.early import Early
from rtp.core.master.external import External
from rtp.core.master.fleet import Fleet
from rtp.core.master.grants import Grants
from rtp.core.master.intake import Intake
from rtp.core.master.ledger import Ledger
from rtp.core.master.links import Links
from rtp.core.master.members import Member, MemberState
from rtp.core.master.overview import overview, placement
from rtp.core.master.placement import Placement
from rtp.core.master.prefix_map import PrefixMap
from rtp.core.master.progress import Progress
from rtp.core.master.ranks import Ranks
from rtp.core.master.rounds import Rounds
from rtp.core.master.tenants import Tenants
from rtp.core.master.totals import Totals
from rtp.core.master.views import Views
from rtp.core.messages import (
    STATUS_COLUMNS,
    Ask,
    Cancel,
    Delta,
    Done,
    Now,
    Register,
    Renew,
    Snapshot,
    Status,
)
from rtp.core.policy import Routing
from rtp.core.types import RequestId, WorkerId

MECHANISMS = ("arriving", "grouping", "order", "progress")
"""That can be switched off: blocks of a granted request count at once; requests of like length
start together; the response ratio (age alone, without); reports say when a rank will be free (the
prediction of the grant alone, without)."""
LEASE_S = 0.25
LEASE_MARGIN_S = 0.5
"""A worker in a long step tells of a Submit with its next beat, 250 ms at most."""
ITEM_BYTES = 8
SWEEP_KEYS = 2000
SWEEP_PAUSE_S = 0.002
NUMBERS_A_TERM = 1024
"""Terms are times in ms, so no rank gets as many grants from one Master to the next: a Submit of
an earlier Master's grant is never taken for that of a grant of this one."""


class Master:
    """handle() every event, then Tick; do what the commands say; call again by next_deadline()."""

    def __init__(
        self,
        term: int,
        routing: Routing,
        *,
        max_ranks: int = 2048,
        max_blocks: int = 4_000_000,
        max_queue_requests: int = 10_000,
        max_queue_tokens: int = 100_000_000,
        ttft_limit_s: float | None = None,
        limits: bool = True,
        tenants: Tenants | None = None,
        lead_s: float = 0.030,
        affinity_chats: int = 100_000,
        affinity_age_s: float = 3600.0,
        kept_placements: int = 1000,
        prefix_map: PrefixMap | None = None,
        grace_s: float = 0.0,
        without: Sequence[str] = (),
    ) -> None:
        """limits: False switches off the gates of queue, TTFT and tenants. tenants: their terms,
        equal ones by default. lead_s: start value of what is then measured. grace_s: how long after
        the start an Ask waits for a first worker of its model, which may be coming back.
        prefix_map: for tests; max_blocks bounds the Master's own. without: mechanisms that are
        switched off, of MECHANISMS, to see what they are worth. Raises ConfigError."""
        unknown = sorted(set(without) - set(MECHANISMS))
        if unknown:
            raise ConfigError(f"no mechanism {unknown[0]!r}; there are {', '.join(MECHANISMS)}")
        self.term = term
        self.map = prefix_map or PrefixMap(max_ranks, max_blocks)
        self.ranks = Ranks(
            max_ranks,
            corrected="progress" not in without,
            first_number=term * NUMBERS_A_TERM,
        )
        self.tenants = Tenants() if tenants is None else tenants
        self.ledger = Ledger(
            self.ranks,
            self.map,
            self.tenants,
            LEASE_S + LEASE_MARGIN_S,
            arriving="arriving" not in without,
        )
        self.fleet = Fleet(
            self.ranks, self.ledger, self.map, self.tenants, lead_s, by_age="order" in without
        )
        self.links = Links(term, self.ranks, self.fleet)
        self.chats = Affinity(affinity_chats, affinity_age_s)
        self.placements = Placement(routing, self.map, self.fleet.place_of, kept_placements)
        self.admission = Admission(
            max_queue_requests=max_queue_requests,
            max_queue_tokens=max_queue_tokens,
            ttft_limit_s=ttft_limit_s,
            limits=limits,
        )
        self.totals = Totals()
        self._views = Views(self.map)
        self._progress = Progress(self.ranks, self.ledger, self.fleet, self.totals)
        self.intake = Intake(
            self.ranks,
            self.map,
            self.ledger,
            self.fleet,
            self.admission,
            self.tenants,
            self.totals,
            Early(grace_s, max_queue_requests),
        )
        self._external = External(self.ranks, self.ledger, self.fleet, self.totals)
        self.rounds = Rounds(
            self.ranks,
            self.fleet,
            self.placements,
            self.chats,
            Grants(self.ranks, self.ledger, self.fleet, self.chats, self.intake.waiting, LEASE_S),
            self.intake.no_room,
            grouping="grouping" not in without,
        )
        self._started_at: float | None = None
        self._swept_at = -inf
        self._sweeping = False
        self._told_at = -inf
        # Any: each handler takes the type it stands under.
        self._handlers: dict[type, Callable[[Any, float], list[Command]]] = {
            Tick: self._tick,
            From: self._from,
            LoopBusy: self._loop_busy,
            LinkUp: self._link_up,
            LinkDown: self._link_down,
            FrontendUp: self._frontend_up,
            FrontendDown: self._frontend_down,
            Register: self._register,
            Status: self._status,
            Now: self._now,
            Delta: self._delta,
            Snapshot: self._snapshot,
            Ask: self.intake.ask,
            Cancel: self.intake.cancel,
            Done: self._external.done,
            Renew: self._external.renew,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """One event's commands, in order. An event that is not the Master's is ignored."""
        if self._started_at is None:
            self._started_at = now
            self.intake.early.start(now)
        self._told_at = now
        handler = self._handlers.get(type(event))
        return [] if handler is None else handler(event, now)

    def next_deadline(self) -> float | None:
        """When to call with Tick if nothing else happens; a past time means at once."""
        due = min(self.fleet.members.next_due, self.ledger.next_due, self.intake.early.next_due)
        if self._sweeping:
            due = min(due, self._swept_at + SWEEP_PAUSE_S)
        for pool in self.fleet.pools.values():
            if pool.wants_round:
                return self._told_at
            due = min(due, pool.next_round, pool.window.next_expiry)
        return None if due == inf else due

    def overview(self, now: float) -> dict[str, object]:
        """Everything for dashboard and metrics, JSON-able, labels bounded. O(workers + queue)."""
        started = now if self._started_at is None else self._started_at
        return overview(self, uptime_s=now - started, now=now)

    def placement(self, request_id: RequestId) -> dict[str, object] | None:
        """Why a request went where it did, while remembered."""
        return placement(self, request_id)

    def booked(self, request_id: RequestId) -> Booking | None:
        """The open grant of a request."""
        return self.ledger.find(request_id)

    def refusal(self, worker_id: WorkerId, epoch: int) -> str:
        """Why this life of a worker, which has registered, is not taken; "" where it is."""
        return self.fleet.members.refusal(worker_id, epoch)

    def models(self) -> dict[str, bool]:
        """The models there are or were, and whether a rank of each may get work now."""
        return {model: len(pool.rows) > 0 for model, pool in self.fleet.pools.items()}

    def idle(self) -> bool:
        """No request waits, nothing is charged."""
        return not self.intake.waiting and not len(self.intake.early) and self.ledger.idle()

    def check(self) -> None:
        """Asserts what must hold between events. For tests; O(everything)."""
        self.ledger.check()
        self.map.check()
        pools = self.fleet.pools.values()
        windows = [w for pool in pools for w in [*pool.window, *pool.at_once.values()]]
        assert {id(w) for w in windows} == {id(w) for w in self.intake.waiting.values()}
        for pool in self.fleet.pools.values():
            pool.view.check()
        assert self.tenants.num_open == len(windows) + len(self.ledger)
        assert sum(p.window.num_held for p in pools) == self.ranks.held.sum()

    # ------------------------------------------------------------ time

    def _tick(self, event: Tick, now: float) -> list[Command]:
        stood_still = self.fleet.members.forgive(now)
        out = self.links.check(now)
        self.ledger.settle_lingering(now)
        out += self._expire_leases(now, stood_still)
        out += self.intake.recall(now)
        out += self._external.expire(now)
        for pool in self.fleet.pools.values():
            out += self.intake.expire(pool, now)
            if pool.dirty or now >= pool.next_round:
                out += self.rounds.run(pool, now)
        self._sweep(now)
        return out

    def _sweep(self, now: float) -> None:
        """Takes out keys of ranks that left or were cleared, a slice at a time."""
        due = now >= self._swept_at + SWEEP_PAUSE_S
        self._swept_at = now if due else self._swept_at
        self._sweeping = not self.map.sweep(SWEEP_KEYS if due else 0)

    def _expire_leases(self, now: float, stood_still: bool) -> list[Command]:
        """Grants that nobody submitted: fenced, so that their number counts and they cannot run."""
        out: list[Command] = []
        for booking in self.ledger.expired(now):
            member, _ = self.fleet.at_row(booking.row)
            if stood_still or member.state is not MemberState.LIVE:
                self.ledger.extend(booking, now)
                continue
            self.totals.leases_expired += 1
            out += self.fleet.withdraw(booking, now)
        return out

    # ------------------------------------------------------------ workers

    def _from(self, event: From, now: float) -> list[Command]:
        handler = self._handlers.get(type(event.message))
        return handler(event.message, now) if handler else []

    def _loop_busy(self, event: LoopBusy, now: float) -> list[Command]:
        self.links.pace(event.share)
        self.placements.busy(event.share)
        return []

    def _register(self, register: Register, now: float) -> list[Command]:
        return self.fleet.register(register, now)

    def _link_up(self, event: LinkUp, now: float) -> list[Command]:
        return self.links.link_up(event.worker_id, event.epoch, now)

    def _link_down(self, event: LinkDown, now: float) -> list[Command]:
        return self.links.link_down(event.worker_id, event.epoch, now)

    def _status(self, status: Status, now: float) -> list[Command]:
        member = self._current(status)
        if member is None:
            return []
        sound = len(status.table) == len(member.rows) * len(STATUS_COLUMNS) * ITEM_BYTES
        if not sound or status.term != self.term or status.seq <= member.acked_seq:
            self.fleet.num_stale += 1
            return []
        out = self.links.heard(member, now)
        table = status.columns()
        self._progress.step(member, table)
        out += self.links.status(member, status, table, now)
        out += self._progress.news(member, status.first_tokens, status.finished, now)
        self._progress.parked(member, status.parked)
        return out + self.links.poll(member)

    def _now(self, message: Now, now: float) -> list[Command]:
        member = self._current(message)
        if member is None:
            return []
        firsts, ends = message.first_tokens, message.finished
        out = self._progress.news(member, firsts, ends, now, early=True)
        self.fleet.changed(member)
        return out + self.links.heard(member, now)

    def _delta(self, delta: Delta, now: float) -> list[Command]:
        member = self._current(delta)
        if member is None:
            return []
        out = self.links.heard(member, now) + self._views.delta(member, delta, now)
        if member.version == delta.to_version:
            return out  # the Poll that answers the next Status confirms it
        return out + self.links.poll(member)

    def _snapshot(self, snapshot: Snapshot, now: float) -> list[Command]:
        member = self._current(snapshot)
        if member is None:
            return []
        out = self.links.heard(member, now) + self._views.snapshot(member, snapshot, now)
        return out + self.links.poll(member)

    def _current(self, message: Status | Now | Delta | Snapshot) -> Member | None:
        """The sender, if it is linked and this is its present life."""
        member = self.fleet.members.current(message.worker_id, message.epoch)
        if member is None or not member.linked:
            self.fleet.num_stale += 1
            present = self.fleet.members.get(message.worker_id)
            if present is not None and message.epoch < present.register.epoch:
                present.num_late += 1
            return None
        return member

    # ------------------------------------------------------------ frontends

    def _frontend_up(self, event: FrontendUp, now: float) -> list[Command]:
        self.fleet.frontends[event.frontend_id] = None
        return []

    def _frontend_down(self, event: FrontendDown, now: float) -> list[Command]:
        self.intake.frontend_down(event.frontend_id, now)
        return []

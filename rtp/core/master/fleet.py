"""Which ranks there are: registrations and removals, and what follows for rows, ledger and map."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rtp.core.commands import Command, HangUp, Note, Send
from rtp.core.master.booking import Booking
from rtp.core.master.columns import NO_ROWS
from rtp.core.master.ledger import Ledger
from rtp.core.master.members import Member, Members, MemberState
from rtp.core.master.pool import Pool
from rtp.core.master.predictor import HardwareClass
from rtp.core.master.prefix_map import PrefixMap
from rtp.core.master.ranks import Ranks
from rtp.core.master.roles import schedulable
from rtp.core.master.shares import Shares
from rtp.core.master.tenants import Tenants
from rtp.core.messages import Fence, Grant, Register, WorkerLost
from rtp.core.types import FrontendId, IntArray, WorkerId

MOST_MODELS = 256
MOST_OWED = 16
"""Numbers a worker is not told of yet: a rank gets no grants while 64 are not counted."""
SAMPLES_PER_MEAN = 32
"""The model's mean prediction follows its ranks' at this pace."""


@dataclass(frozen=True, slots=True)
class _Seat:
    member: Member
    rank: int
    place: tuple[WorkerId, int]


class Fleet:
    """Each method takes one event and returns the commands that follow from it."""

    def __init__(
        self,
        ranks: Ranks,
        ledger: Ledger,
        prefix_map: PrefixMap,
        tenants: Tenants,
        lead_s: float,
        *,
        by_age: bool = False,
    ) -> None:
        """by_age: nothing but age orders what waits."""
        self._by_age = by_age
        self.members = Members()
        self.pools: dict[str, Pool] = {}
        """By model; kept, without members, after its last worker left."""
        self.frontends: dict[FrontendId, None] = {}
        self.num_stale = 0
        """Messages of an old epoch, term or sequence."""
        self._ranks = ranks
        self._ledger = ledger
        self._map = prefix_map
        self._tenants = tenants
        self._lead_s = lead_s
        self._seats: list[_Seat | None] = [None] * ranks.capacity
        self._classes: dict[tuple[object, ...], HardwareClass] = {}

    # ------------------------------------------------------------ who is where

    def at_row(self, row: int) -> tuple[Member, int]:
        """The worker of a row in use, and the rank inside it."""
        seat = self._seats[row]
        assert seat is not None
        return seat.member, seat.rank

    def place_of(self, row: int) -> tuple[WorkerId, int]:
        seat = self._seats[row]
        assert seat is not None
        return seat.place

    def row_of(self, place: tuple[WorkerId, int] | None) -> int:
        """-1 when that worker or rank is not there."""
        if place is None:
            return -1
        member = self.members.get(place[0])
        return int(member.rows[place[1]]) if member and place[1] < len(member.rows) else -1

    def rows_of(self, worker_ids: Sequence[WorkerId]) -> IntArray:
        found = [self.members.get(worker_id) for worker_id in worker_ids]
        rows = [member.rows for member in found if member is not None]
        return np.concatenate(rows) if rows else NO_ROWS

    def learned(self, member: Member) -> None:
        """Its hardware class saw a sample: every rank of the class predicts anew."""
        if member.hardware.num_samples % SAMPLES_PER_MEAN == 0:
            pool = self.pools.get(member.register.model)
            if pool is not None:
                pool.learn(self._ranks)

    def changed(self, member: Member) -> None:
        """Its load is not as it was: what waits may be placed now."""
        pool = self.pools.get(member.register.model)
        if pool is not None:
            pool.dirty = True

    # ------------------------------------------------------------ registrations

    def register(self, register: Register, now: float) -> list[Command]:
        """Dials a new life; leaves a present one alone; replaces another life, role, address."""
        known = self.members.get(register.worker_id)
        if known is not None:
            if register.epoch < known.register.epoch:
                self.num_stale += 1
                return []
            if register == known.register and known.outside:
                known.heard_at = now
                return []
            if register == known.register:
                return known.dial_early()
        refusal = self._mismatch(register)
        if refusal:
            return self._refuse(register, refusal, now)
        out: list[Command] = []
        for old in (known, self.members.at_address(register.address)):
            if old is not None and old.present:
                out += self.remove(old, MemberState.REPLACED, "registered anew", now)
        rows = self._ranks.take(register.kv_total, register.max_batch_tokens, register.max_rows)
        if rows is None:
            return out + self._refuse(register, "the rank table is full", now)
        member = Member(register, rows, self._hardware(register), since=now)
        if member.outside:
            member.state, member.heard_at = MemberState.LIVE, now
        hardware = member.hardware
        hardware.rows = np.concatenate([hardware.rows, rows])
        self._ranks.classes[rows] = hardware.index
        if register.lockstep:
            self._ranks.join(rows)
        for rank, row in enumerate(rows.tolist()):
            self._seats[row] = _Seat(member, rank, (member.worker_id, rank))
            self._map.promise(row, register.prefix_closed)
        if schedulable(register.role):
            if register.model not in self.pools:
                self.pools[register.model] = Pool(
                    register.model,
                    self._lead_s,
                    Shares(self._tenants.weight),
                    by_age=self._by_age,
                )
            self.pools[register.model].members[register.worker_id] = member
        self.members.add(member)
        self.refresh(member)
        facts = member.facts() | {"role": str(register.role), "model": register.model}
        out.append(Note("worker.registered", facts))
        return out if member.outside else [*out, member.dial()]

    def _mismatch(self, register: Register) -> str:
        """Why this worker cannot serve beside the others of its model; "" if it can."""
        if not register.kv_total or len(register.kv_total) != register.ranks:
            return f"{len(register.kv_total)} cache sizes for {register.ranks} ranks"
        if register.block_size < 1 or min(register.kv_total) < 1:
            return "block size and cache sizes must be positive"
        for other in self.members:
            mine = other.register
            leaving = mine.worker_id == register.worker_id or mine.address == register.address
            if leaving or mine.model != register.model:
                continue
            for field in ("kv_format", "block_size", "key_id"):
                if getattr(mine, field) != getattr(register, field):
                    return (
                        f"{field} {getattr(register, field)!r} differs from "
                        f"{getattr(mine, field)!r} of {mine.worker_id}"
                    )
        if register.model not in self.pools and len(self.pools) >= MOST_MODELS:
            self.pools = {k: p for k, p in self.pools.items() if p.members or p.window.num_waiting}
        if register.model not in self.pools and len(self.pools) >= MOST_MODELS:
            return f"{MOST_MODELS} models are served already"
        return ""

    def _refuse(self, register: Register, reason: str, now: float) -> list[Command]:
        """Visible under departed; once per worker and reason, for it will ask again."""
        if self.members.refusal(register.worker_id, register.epoch) == reason:
            return []
        self.members.note_departed(register, MemberState.REFUSED, reason, now)
        facts: dict[str, object] = {"worker_id": register.worker_id, "reason": reason}
        return [Note("worker.refused", facts)]

    def _hardware(self, register: Register) -> HardwareClass:
        """Shared by all workers that run this model in the same way on the same hardware; where
        none is named, by those of one profile. Classes that nobody uses are dropped."""
        what = (register.model, register.kv_format, register.max_batch_tokens)
        key = (*what, register.hardware or register.profile)
        if key not in self._classes:
            self._classes = {k: v for k, v in self._classes.items() if len(v.rows)}
            used = {other.index for other in self._classes.values()}
            free = next(i for i in itertools.count() if i not in used)
            self._classes[key] = HardwareClass(register.profile, free, self._ranks.profiles[free])
        hardware = self._classes[key]
        hardware.offer(register.profile)
        return hardware

    # ------------------------------------------------------------ loss

    def withdraw(self, booking: Booking, now: float, *, used: float = 0) -> list[Command]:
        """Releases a grant whose attempt must not run (any more; it has used so many tokens), and
        puts a tombstone on its worker; kept for a link that is down."""
        grant = booking.grant
        self._ledger.release(booking, now, used=used)
        self.pools[booking.model].dirty = True
        if booking.external:
            return []
        decode = [] if booking.decode is None else self.fence(booking.decode.grant)
        return self.fence(grant) + decode

    def fence(self, grant: Grant) -> list[Command]:
        """A tombstone for an attempt on a worker where it must not run; its number counts."""
        member = self.members.current(grant.worker_id, grant.epoch)
        if member is None:
            return []
        if not member.linked:
            member.owed_fences.append(_fence(grant))
            return []
        return [Send(member.worker_id, _fence(grant))]

    def count(self, grant: Grant) -> list[Command]:
        """Has a worker count the number of an attempt that nobody will submit to it. There is no
        hurry: several are told at once, with the next Poll at the latest."""
        member = self.members.current(grant.worker_id, grant.epoch)
        if member is None:
            return []
        member.owed_fences.append(_fence(grant))
        return member.settle_fences() if len(member.owed_fences) >= MOST_OWED else []

    def remove(self, member: Member, state: MemberState, reason: str, now: float) -> list[Command]:
        """This life is over: its bookings and keys go, its frontends are told."""
        register = member.register
        num_bookings = self._ledger.release_rows(member.rows, now)
        self.members.remove(member, state, reason, now)
        pool = self.pools.get(register.model)
        if pool is not None and pool.members.pop(register.worker_id, None) is not None:
            pool.refresh(self._ranks)
        self._ranks.give_back(member.rows)
        hardware = member.hardware
        hardware.rows = hardware.rows[~np.isin(hardware.rows, member.rows)]
        for row in member.rows.tolist():
            self._seats[row] = None
        event = "worker.failed" if state is MemberState.FAILED else "worker.lost"
        facts = member.facts() | {"reason": reason, "num_bookings": num_bookings}
        lost = WorkerLost(register.worker_id, register.epoch)
        return [
            HangUp(register.worker_id, register.epoch),
            *(Send(frontend_id, lost) for frontend_id in self.frontends),
            Note(event, facts),
        ]

    def refresh(self, member: Member) -> None:
        """Its state changed: what of its model may be granted is worked out anew."""
        pool = self.pools.get(member.register.model)
        if pool is not None:
            pool.refresh(self._ranks)


def _fence(grant: Grant) -> Fence:
    return Fence(grant.request_id, grant.attempt, grant.rank, grant.number)

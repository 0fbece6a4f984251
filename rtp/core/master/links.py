"""Links to the workers: dialled, up, silent, closed; what a Status says of the worker itself."""

from __future__ import annotations

from rtp.core.commands import Command, HangUp, Note, Send
from rtp.core.master.fleet import Fleet
from rtp.core.master.members import FIRST_REDIAL_S, LOST_S, MOST_REDIAL_S, Member, MemberState
from rtp.core.master.ranks import Ranks
from rtp.core.messages import Fence, Poll, Status
from rtp.core.types import IntArray, RequestId, WorkerId

STATUS_PERIOD_S, LONGEST_PERIOD_S = 0.020, 0.100
STRETCH = 1.5
BUSY, CALM = 0.8, 0.7
"""Shares of its time. The status period stretches above the one and shrinks below the other."""
DELTA_PERIOD_S = 0.050
NOBODY = RequestId("")
"""Of a Fence that only counts a number."""


class Links:
    """Each method takes one event and returns the commands that follow from it."""

    def __init__(self, term: int, ranks: Ranks, fleet: Fleet) -> None:
        self._term = term
        self._ranks = ranks
        self._fleet = fleet
        self._members = fleet.members
        self.status_period_s = STATUS_PERIOD_S
        """What workers are asked for now."""

    def pace(self, busy: float) -> None:
        """Asks for fewer reports while the Master's loop is too busy, and for more again after. The
        next Poll to each worker says so."""
        if busy > BUSY:
            self.status_period_s = min(self.status_period_s * STRETCH, LONGEST_PERIOD_S)
        elif busy < CALM:
            self.status_period_s = max(self.status_period_s / STRETCH, STATUS_PERIOD_S)

    def link_up(self, worker_id: WorkerId, epoch: int, now: float) -> list[Command]:
        member = self._members.current(worker_id, epoch)
        if member is None:
            return [HangUp(worker_id, epoch)]
        member.state = MemberState.LINKED
        member.heard_at = now
        member.num_dials = 0
        self._fleet.refresh(member)
        self._members.arm(member)
        return self.poll(member)

    def link_down(self, worker_id: WorkerId, epoch: int, now: float) -> list[Command]:
        """Dials again soon. A link that was up has 3 s to come back, a new worker 10 s."""
        member = self._members.current(worker_id, epoch)
        if member is None:
            return []
        if member.outside:
            return self._fleet.remove(member, MemberState.LOST, "signed off", now)
        out: list[Command] = []
        if member.linked:
            member.state = MemberState.RECONNECTING
            member.heard_at = now
            member.snapshot_next = 0
            self._fleet.refresh(member)
            facts = member.facts() | {"reason": "link closed"}
            out.append(Note("worker.suspected", facts))
        member.next_dial = now + min(FIRST_REDIAL_S * 2.0**member.num_dials, MOST_REDIAL_S)
        self._members.arm(member)
        return out

    def heard(self, member: Member, now: float) -> list[Command]:
        """Any message of its present life."""
        member.heard_at = now
        if member.state is not MemberState.SUSPECT:
            return []
        member.state = MemberState.LIVE
        self._fleet.refresh(member)
        self._members.arm(member)
        return [Note("worker.recovered", member.facts())]

    def status(self, member: Member, status: Status, table: IntArray, now: float) -> list[Command]:
        """A Status that is newer than the last: load, seen grants, draining, hung. table: its
        columns()."""
        out: list[Command] = []
        first = member.state is MemberState.LINKED
        if first:
            member.state = MemberState.LIVE
            self._members.arm(member)
            out.append(Note("worker.joined", member.facts()))
        if member.acked_seq < 0:
            self._ranks.begin_numbers(member.rows, table)
        elif first:
            for rank, number in self._ranks.lost_numbers(member.rows, table):
                out.append(Send(member.worker_id, Fence(NOBODY, 0, rank, number)))
        member.acked_seq = status.seq
        member.status_at = now
        member.table, member.group = table, status.group
        self._ranks.report(member.rows, table, now)
        self._fleet.changed(member)
        if first or member.draining != status.draining:
            if status.draining and not member.draining:
                out.append(Note("worker.drained", member.facts()))
            member.draining = status.draining
            self._fleet.refresh(member)
        if member.hung != status.hung:
            member.hung = status.hung
            self._fleet.refresh(member)
            out.append(Note("worker.hung" if status.hung else "worker.recovered", member.facts()))
        return out

    def poll(self, member: Member) -> list[Command]:
        """The standing request for reports, with what was received, behind the fences it owes."""
        worker_id = member.worker_id
        poll = Poll(
            self._term, self.status_period_s, DELTA_PERIOD_S, member.acked_seq, member.version
        )
        return [*member.settle_fences(), Send(worker_id, poll)]

    def check(self, now: float) -> list[Command]:
        """Whatever silence or a pause between dials has brought by now."""
        out: list[Command] = []
        for member in self._members.due(now):
            silent_s = now - member.heard_at
            match member.state:
                case MemberState.DIALLING if now < member.next_dial:
                    out += self._fleet.remove(member, MemberState.FAILED, "never reached", now)
                case state if state is not MemberState.DIALLING and now >= member.mute_at:
                    out += self._fleet.remove(member, MemberState.LOST, "no status", now)
                case MemberState.LIVE if member.outside:
                    out += self._fleet.remove(member, MemberState.LOST, "silent", now)
                case MemberState.LIVE:
                    member.state = MemberState.SUSPECT
                    self._fleet.refresh(member)
                    facts = member.facts() | {"reason": "silent", "silent_s": silent_s}
                    out.append(Note("worker.suspected", facts))
                case MemberState.LINKED | MemberState.SUSPECT:
                    out += self._fleet.remove(member, MemberState.LOST, "silent", now)
                case MemberState.RECONNECTING if now >= member.heard_at + LOST_S:
                    out += self._fleet.remove(member, MemberState.LOST, "link closed", now)
                case _:
                    out.append(member.dial())
            if member.present:
                self._members.arm(member)
        return out

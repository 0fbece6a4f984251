"""Who is registered and how it stands: the life of each worker as the Master sees it.

    dialling -> linked -> live <-> suspect      a Status every 250 ms at least keeps it live
        |          |        |       |
      failed      reconnecting -> lost          the same epoch back within 3 s goes on

A worker is known by its id and by its address: registering either again replaces what was there.
Messages of another epoch are nobody's. Beside its state a worker may be draining, or hung: alive,
but with a step that does not end. Either way it gets no new grants.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from rtp.core.commands import Command, Dial, Send
from rtp.core.master.booking import Booking
from rtp.core.master.predictor import HardwareClass
from rtp.core.messages import Fence, GroupCost, Register
from rtp.core.types import IntArray, RequestId, WorkerId

SUSPECT_S = 0.5
LOST_S = 3.0
FAIL_S = 10.0
"""A registered worker that was never reached, or is reached and never reports, is given up after
it."""
FIRST_REDIAL_S = 0.05
MOST_REDIAL_S = 1.0
STOOD_STILL_S = 0.2
"""A Master that looks so much later than it wanted to has not listened meanwhile."""
KEPT_DEPARTED = 64
NO_VERSION = -1


class MemberState(StrEnum):
    DIALLING = "dialling"  # never linked yet
    LINKED = "linked"  # link up, nothing heard yet
    LIVE = "live"
    SUSPECT = "suspect"  # silent: no new grants
    RECONNECTING = "reconnecting"  # link closed: no new grants
    FAILED = "failed"  # never reached
    LOST = "lost"
    REPLACED = "replaced"
    REFUSED = "refused"


PRESENT = (
    MemberState.DIALLING,
    MemberState.LINKED,
    MemberState.LIVE,
    MemberState.SUSPECT,
    MemberState.RECONNECTING,
)


HUNG = "hung"
SHOWN = (*(str(state) for state in PRESENT), HUNG)


@dataclass(slots=True, eq=False)
class Member:
    """One life of one worker. Changed by the Master only."""

    register: Register
    rows: IntArray
    """[ranks]: the worker's rows in Ranks."""
    hardware: HardwareClass
    since: float
    state: MemberState = MemberState.DIALLING
    heard_at: float = 0.0
    """Of the last message, or when the link opened or closed."""
    status_at: float = -inf
    """Of the last Status."""
    table: IntArray | None = None
    """[ranks, len(STATUS_COLUMNS)] of the last Status."""
    group: GroupCost | None = None
    """Where its ranks step together, as the last Status told."""
    next_dial: float = inf
    num_dials: int = 0
    armed_at: float = inf
    acked_seq: int = -1
    version: int = NO_VERSION
    viewed_at: float = 0.0
    """When the view last agreed with the worker."""
    snapshot_version: int = NO_VERSION
    snapshot_next: int = 0
    """Slices of the snapshot under way that were applied; 0: none."""
    status_period_s: float = 0.0
    draining: bool = False
    hung: bool = False
    """A step of it takes far longer than it should."""
    num_resyncs: int = 0
    num_gaps: int = 0
    num_late: int = 0
    """Messages of an earlier life of it."""
    view_source: str = "none"
    """What the view was last made of: a "snapshot", or a "delta" since."""
    num_failures: int = 0
    """Attempts that were lost after a grant here."""
    parked: dict[RequestId, Booking] = field(default_factory=dict)
    """Requests that wait for slow readers, as last told."""
    owed_fences: list[Fence] = field(default_factory=list)
    """To be sent with the next Poll."""

    @property
    def worker_id(self) -> WorkerId:
        return self.register.worker_id

    @property
    def present(self) -> bool:
        return self.state in PRESENT

    @property
    def linked(self) -> bool:
        return self.state in (MemberState.LIVE, MemberState.LINKED, MemberState.SUSPECT)

    @property
    def outside(self) -> bool:
        """An engine of somebody else: no link, no Status."""
        return self.register.silence_s > 0

    @property
    def usable(self) -> bool:
        """May get new grants."""
        return self.state is MemberState.LIVE and not self.draining and not self.hung

    @property
    def shown(self) -> str:
        """The state for people: a live worker may be hung."""
        return HUNG if self.hung and self.state is MemberState.LIVE else str(self.state)

    def facts(self) -> dict[str, object]:
        """What a Note says of it."""
        register = self.register
        return {
            "worker_id": register.worker_id,
            "epoch": register.epoch,
            "address": register.address,
        }

    def dial(self) -> Command:
        self.next_dial = inf
        self.num_dials += 1
        return Dial(self.register.worker_id, self.register.epoch, self.register.address)

    def dial_early(self) -> list[Command]:
        """It says itself that it is there: no need to sit out the pause between dials."""
        return [] if self.next_dial == inf else [self.dial()]

    def settle_fences(self) -> list[Command]:
        """Those it owes, where there is a link."""
        if not self.owed_fences or not self.linked:
            return []
        fences, self.owed_fences = self.owed_fences, []
        return [Send(self.worker_id, fence) for fence in fences]

    @property
    def mute_at(self) -> float:
        """When it is given up unless a Status comes, whatever else it does."""
        return inf if self.outside else max(self.status_at, self.since) + FAIL_S

    def next_check(self) -> float:
        """When time alone changes its state."""
        if self.outside:
            return self.heard_at + self.register.silence_s
        match self.state:
            case MemberState.DIALLING:
                return min(self.next_dial, self.since + FAIL_S)
            case MemberState.LIVE:
                return min(self.heard_at + SUSPECT_S, self.mute_at)
            case MemberState.LINKED | MemberState.SUSPECT:
                return min(self.heard_at + LOST_S, self.mute_at)
            case MemberState.RECONNECTING:
                return min(self.next_dial, self.heard_at + LOST_S, self.mute_at)
            case _:
                return inf


@dataclass(frozen=True, slots=True)
class Departed:
    """What is left to show of a worker that is not there any more."""

    worker_id: WorkerId
    epoch: int
    address: str
    model: str
    state: MemberState
    reason: str
    at: float


class Members:
    """Registered workers by id and by address, their timers, and the last ones that left."""

    def __init__(self) -> None:
        self._by_id: dict[WorkerId, Member] = {}
        self._by_address: dict[str, WorkerId] = {}
        self._timers: list[tuple[float, int, Member]] = []
        self._num_timers = 0
        self.departed: deque[Departed] = deque(maxlen=KEPT_DEPARTED)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, worker_id: WorkerId) -> Member | None:
        return self._by_id.get(worker_id)

    def at_address(self, address: str) -> Member | None:
        worker_id = self._by_address.get(address)
        return None if worker_id is None else self._by_id.get(worker_id)

    def current(self, worker_id: WorkerId, epoch: int) -> Member | None:
        """The member, if this is the life of it that is registered."""
        member = self._by_id.get(worker_id)
        return member if member is not None and member.register.epoch == epoch else None

    def add(self, member: Member) -> None:
        self._by_id[member.worker_id] = member
        self._by_address[member.register.address] = member.worker_id
        self.arm(member)

    def remove(self, member: Member, state: MemberState, reason: str, now: float) -> None:
        """Forgets it and frees its address; what became of it stays visible for a while."""
        member.state = state
        del self._by_id[member.worker_id]
        del self._by_address[member.register.address]
        self.note_departed(member.register, state, reason, now)

    def refusal(self, worker_id: WorkerId, epoch: int) -> str:
        """Why this life of a worker is not registered; "" where it is, or never asked."""
        member = self._by_id.get(worker_id)
        if member is not None and member.register.epoch >= epoch:
            later = member.register.epoch > epoch
            return f"{worker_id} is registered with a later start" if later else ""
        last = next((d for d in reversed(self.departed) if d.worker_id == worker_id), None)
        found = last and (last.epoch, last.state) == (epoch, MemberState.REFUSED)
        return last.reason if last and found else ""

    def note_departed(
        self, register: Register, state: MemberState, reason: str, now: float
    ) -> None:
        self.departed.append(
            Departed(
                register.worker_id,
                register.epoch,
                register.address,
                register.model,
                state,
                reason,
                now,
            )
        )

    # ------------------------------------------------------------ timers

    def arm(self, member: Member) -> None:
        """To be called when its next check may have come nearer. A later check arms itself."""
        at = member.next_check()
        if at < member.armed_at:
            member.armed_at = at
            self._num_timers += 1
            heapq.heappush(self._timers, (at, self._num_timers, member))

    def forgive(self, now: float) -> bool:
        """Whether the Master itself stood still until now (SIGSTOP, a suspended machine, a loop
        that was blocked): that time is nobody's silence. What was sent meanwhile is not read
        yet."""
        late_s = now - self.next_due
        if late_s < STOOD_STILL_S:
            return False
        more_s = late_s + STOOD_STILL_S
        for member in self._by_id.values():
            member.since = min(member.since + more_s, now)
            member.heard_at = min(member.heard_at + more_s, now)
            member.status_at = min(member.status_at + more_s, now)
        return True

    def due(self, now: float) -> list[Member]:
        """Members whose state time has changed by now."""
        due = []
        while self._timers and self._timers[0][0] <= now:
            at, _, member = heapq.heappop(self._timers)
            if at != member.armed_at or not member.present:
                continue
            member.armed_at = inf
            if member.next_check() <= now:
                due.append(member)
            else:
                self.arm(member)
        return due

    @property
    def next_due(self) -> float:
        return self._timers[0][0] if self._timers else inf

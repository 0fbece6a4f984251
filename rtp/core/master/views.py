"""The Master's view of each worker's cache: (epoch, version) and the keys in the prefix map.

A Delta must start at the view's version. Anything else (a lost frame, a cleared cache, a slice out
of order) drops to "no version", which the next Poll tells the worker; its Snapshot rebuilds the
view. Until then the old keys may earn credit they no longer deserve: a slower choice, never a wrong
answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from rtp.core.commands import Command, Note
from rtp.core.master.members import NO_VERSION, Member
from rtp.core.master.prefix_map import PrefixMap
from rtp.core.messages import Delta, KeyChange, Snapshot
from rtp.core.types import Tier

TIERS = tuple(Tier)


class Views:
    """Applies what workers report of their caches."""

    def __init__(self, prefix_map: PrefixMap) -> None:
        self._map = prefix_map

    def delta(self, member: Member, delta: Delta, now: float) -> list[Command]:
        if delta.to_version <= member.version:
            return []  # a repeat
        if delta.from_version != member.version or not self._apply(member, delta.changes):
            return self._gap(member, delta.from_version)
        member.version = delta.to_version
        member.viewed_at, member.view_source = now, "delta"
        return []

    def snapshot(self, member: Member, snapshot: Snapshot, now: float) -> list[Command]:
        """Slice by slice; the first clears what was believed before."""
        if snapshot.index == 0:
            for row in member.rows.tolist():
                self._map.clear_rank(row)
            member.version = NO_VERSION
            member.snapshot_version = snapshot.version
        elif snapshot.index != member.snapshot_next or snapshot.version != member.snapshot_version:
            return self._gap(member, snapshot.version)
        if not self._apply(member, snapshot.changes):
            return self._gap(member, snapshot.version)
        member.snapshot_next = snapshot.index + 1
        if member.snapshot_next < snapshot.count:
            return []
        member.snapshot_next = 0
        member.version = snapshot.version
        member.viewed_at, member.view_source = now, "snapshot"
        member.num_resyncs += 1
        facts: dict[str, object] = {"worker_id": member.worker_id, "version": snapshot.version}
        return [Note("view.resynced", facts)]

    def _apply(self, member: Member, changes: Iterable[KeyChange]) -> bool:
        """False when a change names a rank or tier there is not."""
        for change in changes:
            if not 0 <= change.rank < len(member.rows) or not 0 <= change.tier < len(TIERS):
                return False
            row, tier = member.rows.item(change.rank), TIERS[change.tier]
            self._map.remove(row, change.removed, tier)
            self._map.add(row, change.added, tier)
        return True

    def _gap(self, member: Member, got: int) -> list[Command]:
        facts: dict[str, object] = {
            "worker_id": member.worker_id,
            "version": member.version,
            "got": got,
        }
        known = member.version != NO_VERSION
        member.version, member.view_source = NO_VERSION, "none"
        member.snapshot_next = 0
        if not known:
            return []  # told before, or on its way
        member.num_gaps += 1
        return [Note("view.lost", facts)]

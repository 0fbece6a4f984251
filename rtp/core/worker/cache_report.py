"""What the Master is told of the ranks' caches: true deltas, and a snapshot on any doubt.

One frame is unconfirmed at a time. A Poll that names the version of that frame confirms it. It is
taken for lost, and a snapshot follows, when the Master says it has no view, names a version it
cannot have, or has seen a Status that was sent after the frame and still does not name the frame's
version.
"""

from __future__ import annotations

from collections.abc import Sequence

from rtp.core.messages import Delta, KeyChange, Snapshot
from rtp.core.types import HASH_BYTES, Tier, WorkerId
from rtp.core.worker.blocks import BlockManager
from rtp.core.worker.stats import Stats

SLICE_KEYS = 1024
MAX_DELTA_KEYS = 4096
"""A larger change is told as a snapshot, whose slices the Master can take one at a time."""


class CacheReport:
    """Versions of one worker's cache. The pending change of a rank is its BlockManager's."""

    def __init__(
        self, worker_id: WorkerId, epoch: int, pools: Sequence[BlockManager], stats: Stats
    ) -> None:
        self.version = 0
        self._worker_id = worker_id
        self._epoch = epoch
        self._pools = pools
        self._stats = stats
        self._needs_snapshot = True
        self._unconfirmed = False
        self._was_delta = False
        self._after_seq = -1
        self._sent_at = 0.0

    def restart(self) -> None:
        """A new link: what was told before does not count."""
        self._needs_snapshot = True
        self._unconfirmed = False

    def polled(self, acked_version: int, acked_seq: int) -> None:
        if acked_version == self.version:
            self._unconfirmed = False
            return
        if self._unconfirmed:
            told_none = acked_version < 0 and self._was_delta
            if not told_none and acked_seq <= self._after_seq:
                return  # the Poll may have crossed the frame
        self._needs_snapshot = True
        self._unconfirmed = False

    def due_at(self, period_s: float) -> float | None:
        """When frames() has something to say; None: not before the next event."""
        if self._unconfirmed:
            return None
        if self._needs_snapshot:
            return 0.0
        if any(pool.num_changes for pool in self._pools):
            return self._sent_at + period_s
        return None

    def frames(self, now: float, last_seq: int) -> list[Delta | Snapshot]:
        """The next delta, or all slices of a snapshot. last_seq: newest Status sent before them."""
        self._after_seq = last_seq
        self._sent_at = now
        self._unconfirmed = True
        overflow = sum(pool.num_changes for pool in self._pools) > MAX_DELTA_KEYS
        self._was_delta = not (self._needs_snapshot or overflow)
        return [self._delta()] if self._was_delta else self._snapshot()

    def _delta(self) -> Delta:
        changes = []
        for rank, pool in enumerate(self._pools):
            added, removed = pool.take_changes()
            if added or removed:
                changes.append(KeyChange(rank, Tier.DEVICE, b"".join(added), b"".join(removed)))
        self.version += 1
        self._stats.deltas += 1
        return Delta(self._worker_id, self._epoch, self.version - 1, self.version, tuple(changes))

    def _snapshot(self) -> list[Delta | Snapshot]:
        slices: list[tuple[KeyChange, ...]] = []
        for rank, pool in enumerate(self._pools):
            pool.take_changes()
            keys = b"".join(pool.keys())
            size = SLICE_KEYS * HASH_BYTES
            slices += [
                (KeyChange(rank, Tier.DEVICE, keys[start : start + size], b""),)
                for start in range(0, len(keys), size)
            ]
        self.version += 1
        self._needs_snapshot = False
        self._stats.snapshots += 1
        slices = slices or [()]
        return [
            Snapshot(self._worker_id, self._epoch, self.version, index, len(slices), changes)
            for index, changes in enumerate(slices)
        ]

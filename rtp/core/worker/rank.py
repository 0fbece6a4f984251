"""One rank of a worker: KV pool and batcher, grants seen, and how it shows itself."""

from __future__ import annotations

from dataclasses import asdict

from rtp.core.ports import Capacity
from rtp.core.worker.batcher import Batcher
from rtp.core.worker.reports import SeenGrants


class Rank:
    """A failed rank has no pool: its Runner is gone for good."""

    __slots__ = ("batcher", "capacity", "failed", "seen", "step_since")

    def __init__(self, capacity: Capacity, batcher: Batcher) -> None:
        self.capacity = capacity
        self.batcher = batcher
        self.seen = SeenGrants()
        self.failed = False
        self.step_since: float | None = None
        """When the step that runs now began."""

    @property
    def kv_total(self) -> int:
        """Tokens."""
        return 0 if self.failed else self.capacity.num_blocks * self.capacity.block_size

    def status_row(self, now: float) -> tuple[int, ...]:
        """One row of Status.table, in the order of STATUS_COLUMNS."""
        load = self.batcher.load()
        host_free = host_total = 0
        return (
            load.running,
            load.waiting,
            load.prefill_tokens,
            load.decode_rows,
            load.context_tokens,
            min(load.kv_free, self.kv_total),
            self.kv_total,
            host_free,
            host_total,
            round(self.batcher.last_step_s * 1e6),
            0 if self.step_since is None else round((now - self.step_since) * 1e6),
            *self.seen.columns(),
        )

    def overview(self) -> dict[str, object]:
        """What GET /status shows of it; JSON-able."""
        return {
            **asdict(self.batcher.load()),
            "kv_total": self.kv_total,
            "block_size": self.capacity.block_size,
            "cached_blocks": self.batcher.blocks.num_cached,
            "step_ms": self.batcher.last_step_s * 1000,
            "steps_in_flight": self.batcher.num_in_flight,
            "failed": self.failed,
        }

"""Counters of a worker since its start: plain numbers for /metrics and /status."""

from __future__ import annotations

from dataclasses import dataclass, field

from rtp.core.messages import GroupCost


@dataclass(slots=True)
class Stats:
    """Only ever grow. The keys of the two tables are fixed words, so they are bounded."""

    steps: int = 0
    busy_s: float = 0.0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens of sequences that were started."""
    prefix_hit_tokens: int = 0
    """Those of them that were found in the cache."""
    preemptions: int = 0
    discarded_rows: int = 0
    """Rows computed for sequences that had ended or been preempted meanwhile."""
    nonfinite_rows: int = 0
    dummy_steps: int = 0
    """Steps of ranks without work, for the others of a lock-step group."""
    group_steps: int = 0
    group_step_s: float = 0.0
    """Of all ranks, from the begin of each group step to the end of its slowest share."""
    group_wait_s: float = 0.0
    """The part of it in which a rank was done and waited for the slowest."""
    pulls: int = 0
    """Transfers of pages from other workers that were begun."""
    pulls_failed: int = 0
    pulled_tokens: int = 0
    snapshots: int = 0
    deltas: int = 0
    rejects: dict[str, int] = field(default_factory=dict)
    finishes: dict[str, int] = field(default_factory=dict)

    def group_cost(self) -> GroupCost:
        return GroupCost(self.group_steps, self.dummy_steps, self.group_step_s, self.group_wait_s)

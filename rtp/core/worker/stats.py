"""Counters of a worker since its start: plain numbers for /metrics and /status."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    snapshots: int = 0
    deltas: int = 0
    rejects: dict[str, int] = field(default_factory=dict)
    finishes: dict[str, int] = field(default_factory=dict)

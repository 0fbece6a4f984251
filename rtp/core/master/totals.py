"""Counters of the Master since its start, all of them bounded in number."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    asked: int = 0
    replaced: int = 0
    """Asks that took the place of an earlier attempt."""
    failed_attempts: int = 0
    """Of them: the earlier one was lost after its grant."""
    cancelled: int = 0
    handovers: int = 0
    """Split requests that went on at their decode rank."""
    leases_expired: int = 0
    external_lapsed: int = 0
    """Grants of router-only mode whose lease ended before their caller was done."""
    prompt_tokens: int = 0
    """Of requests whose first token came."""
    predicted_hit_tokens: int = 0
    hit_tokens: int = 0
    """Found in the worker's cache indeed."""
    missed_predictions: int = 0
    """Requests with predicted hits of which the worker found nothing: hashes disagree."""
    finished: dict[str, int] = field(
        default_factory=lambda: {"done": 0, "cancelled": 0, "rejected": 0, "failed": 0}
    )
    """Ends by the worker's reason."""

"""What a replay tells: a column per fact, with one entry a row of the trace."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from rtp.core.messages import Grant
from rtp.core.outcomes import Outcome
from rtp.core.trace import TraceRow
from rtp.core.types import FloatArray, IntArray

NAN = float("nan")
FAILED_TYPE = "<U48"
"""Of `failed`: so much of a reason is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Arrays of one entry a row, in the trace's order. Times in seconds since the first arrival."""

    arrival_s: FloatArray
    granted_s: FloatArray
    """The grant that its first token came of, the last one where none came; NaN where there was
    none, or grants are not seen."""
    first_s: FloatArray
    """Its first token; NaN where none came."""
    ended_s: FloatArray
    """Its end, whichever it was."""
    ranks: IntArray
    """Where that grant placed it, counted over the fleet; -1: nowhere, or it is not known."""
    prompt_tokens: IntArray
    cached_tokens: IntArray
    """Prompt tokens that were found in a cache; 0 where no first token came."""
    output_tokens: IntArray
    """Generated, by however many attempts."""
    attempts: IntArray
    """Grants that it got; 0 where they are not seen."""
    failed: npt.NDArray[np.str_]
    """Why it failed, as "503 service_unavailable"; "" where it did not."""
    num_holds: int = 0
    """Times a request was held for a busy rank."""
    grants_seen: bool = True
    """False of a live run: nobody outside sees grants, ranks and holds."""
    num_fallbacks: int = 0
    """Decisions in which the policy failed, so that the Master took the least predicted wait."""
    last_fallback: str = ""
    """What was wrong with the last of them."""
    outcomes: list[Outcome] = field(default_factory=list)
    """What a run in virtual time delivered, where it was kept."""

    @property
    def ttft_s(self) -> FloatArray:
        """From arrival to first token; NaN where none came."""
        return self.first_s - self.arrival_s

    @property
    def waited_s(self) -> FloatArray:
        """From arrival to the grant; NaN where there was none."""
        return self.granted_s - self.arrival_s

    @property
    def tpot_s(self) -> FloatArray:
        """Mean time of the output tokens after the first; NaN where there are none."""
        later = np.where(self.ok & (self.output_tokens > 1), self.output_tokens - 1.0, np.nan)
        return (self.ended_s - self.first_s) / later

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Whether it came to its proper end."""
        return np.asarray(self.failed == "", dtype=np.bool_)

    @property
    def new_tokens(self) -> IntArray:
        """Prompt tokens that were computed; 0 where no first token came."""
        return np.where(np.isnan(self.first_s), 0, self.prompt_tokens - self.cached_tokens)

    @property
    def end_s(self) -> float:
        """When the last request had ended."""
        return float(self.ended_s.max(initial=0.0))

    @property
    def hit_ratio(self) -> float:
        """Share of all prompt tokens that were found in a cache."""
        return float(self.cached_tokens.sum()) / max(1, int(self.prompt_tokens.sum()))

    def imbalance(self, num_ranks: int) -> float:
        """Prompt tokens computed for first tokens by the busiest of the first num_ranks ranks, over
        their mean: those that prefill come before those that only decode."""
        placed = (self.ranks >= 0) & (self.ranks < num_ranks)
        work = np.bincount(self.ranks[placed], self.new_tokens[placed], minlength=num_ranks)
        return float(work.max() / work.mean()) if work.any() else 1.0

    def columns_only(self) -> Self:
        """Without the outcomes, which take most of the memory."""
        return replace(self, outcomes=[])

    def to_bytes(self) -> bytes:
        """The columns, for another process."""
        file = io.BytesIO()
        kept = [f.name for f in fields(self) if f.name != "outcomes"]
        np.savez(file, allow_pickle=False, **{n: np.asarray(getattr(self, n)) for n in kept})
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The opposite of to_bytes(); there are no outcomes."""
        with np.load(io.BytesIO(data), allow_pickle=False) as columns:
            kept = {name: columns[name] for name in columns.files}
        facts = {name: value.item() for name, value in kept.items() if not value.ndim}
        return cls(**kept | facts)


def replayed(
    rows: Sequence[TraceRow],
    outcomes: list[Outcome],
    places: Mapping[tuple[str, int], int],
    *,
    start_s: float,
    num_holds: int,
    num_fallbacks: int = 0,
    last_fallback: str = "",
) -> Replayed:
    """outcomes: one a row.  places: (worker, rank) -> rank counted over the fleet.  start_s: the
    world's time of the first arrival."""
    grants = [_told_by(o) for o in outcomes]
    started = np.array([o.first_token_at is not None for o in outcomes], dtype=np.bool_)
    cached = np.array([o.cached_tokens for o in outcomes], dtype=np.int64)
    return Replayed(
        arrival_s=_times([o.begun_at for o in outcomes], start_s),
        granted_s=_times([None if grant is None else grant[0] for grant in grants], start_s),
        first_s=_times([o.first_token_at for o in outcomes], start_s),
        ended_s=_times([o.ended_at for o in outcomes], start_s),
        ranks=_ints([-1 if g is None else _place(g[1], places) for g in grants]),
        prompt_tokens=_ints([row.num_tokens for row in rows]),
        cached_tokens=np.where(started, cached, 0),
        output_tokens=_ints([sum(len(c.ids) for c in o.choices.values()) for o in outcomes]),
        attempts=_ints([len(o.grants) for o in outcomes]),
        failed=np.array([_reason(o) for o in outcomes], dtype=FAILED_TYPE),
        num_holds=num_holds,
        num_fallbacks=num_fallbacks,
        last_fallback=last_fallback,
        outcomes=outcomes,
    )


def _told_by(outcome: Outcome) -> tuple[float, Grant] | None:
    """The grant that the first token came of; the last one where none came."""
    first = outcome.first_token_at
    before = [each for each in outcome.grants if first is None or each[0] <= first]
    return before[-1] if before else None


def _times(values: Sequence[float | None], start_s: float) -> FloatArray:
    return np.array([NAN if v is None else v for v in values], dtype=np.float64) - start_s


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _place(grant: Grant, places: Mapping[tuple[str, int], int]) -> int:
    return places[grant.worker_id, grant.rank]


def _reason(outcome: Outcome) -> str:
    return f"{outcome.failed.status} {outcome.failed.code}" if outcome.failed is not None else ""

"""Steps in flight: rows are issued as a plan, come back as a result, and bring sequences tokens.

A sequence moves twice: `scheduled` when a plan takes its tokens, `computed` when the step has come
back. Rows of a sequence that ended or was preempted in between are thrown away.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rtp.core.errors import ProtocolError
from rtp.core.steps import FromStep, Received, RowResult, StepPlan, StepResult, TokenLogprobs
from rtp.core.worker.sequence import Sequence
from rtp.core.worker.stats import Stats


@dataclass(frozen=True, slots=True)
class Gain:
    """What a completed step brought one sequence."""

    sequence: Sequence
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str = ""
    stop_token: int = -1
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One row of a step in flight."""

    sequence: Sequence
    handle: int
    num_new: int
    samples: bool
    prefill: bool

    @property
    def stale(self) -> bool:
        """Its sequence ended, or was preempted and perhaps started anew, since it was issued."""
        return self.sequence.ended or self.sequence.handle != self.handle


class InFlight:
    """Steps of one rank that were issued and are not completed, oldest first."""

    __slots__ = ("_block_size", "_ended_handles", "_next", "_stats", "_steps", "_vocab_size")

    def __init__(self, vocab_size: int, block_size: int, stats: Stats) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._stats = stats
        self._next = 0
        self._steps: deque[tuple[int, list[Scheduled]]] = deque()
        self._ended_handles: list[int] = []

    def __len__(self) -> int:
        return len(self._steps)

    def ended(self, handle: int) -> None:
        """The next plan tells the Runner that it may forget this one."""
        self._ended_handles.append(handle)

    @property
    def next_step(self) -> int:
        """Number of the next plan."""
        return self._next

    @property
    def oldest_step(self) -> int:
        """Every step before it has come back."""
        return self._steps[0][0] if self._steps else self._next

    def issue(
        self,
        chosen: dict[Sequence, int],
        received: tuple[Received, ...] = (),
        *,
        dummy: bool = False,
    ) -> StepPlan:
        """chosen: tokens to compute of each; they have pages."""
        rows, scheduled = [], []
        started = [seq for seq in chosen if not seq.announced]
        for index, (seq, num_new) in enumerate(chosen.items()):
            row = seq.row(num_new, self._block_size)
            samples = row.output_index >= 0
            rows.append(row)
            scheduled.append(Scheduled(seq, seq.handle, num_new, samples, seq.in_prefill))
            seq.scheduled += num_new
            if samples:
                seq.pending.append(FromStep(self._next, index))
        plan = StepPlan(
            step=self._next,
            rows=tuple(rows),
            started=tuple(seq.start_info() for seq in started),
            ended=tuple(self._ended_handles),
            dummy=dummy,
            received=received,
        )
        for seq in started:
            seq.announced = True
        self._ended_handles.clear()
        self._steps.append((self._next, scheduled))
        self._next += 1
        self._stats.computed_tokens += sum(chosen.values())
        return plan

    def land(self, result: StepResult) -> list[tuple[Scheduled, RowResult]]:
        """The rows of the oldest step that still count. Raises ProtocolError for any other."""
        if not self._steps or self._steps[0][0] != result.step:
            raise ProtocolError(f"step {result.step} is not the oldest in flight")
        _, scheduled = self._steps.popleft()
        if len(scheduled) != len(result.rows):
            raise ProtocolError(f"step {result.step}: {len(result.rows)} rows returned")
        landed = [
            (row, answer)
            for row, answer in zip(scheduled, result.rows, strict=True)
            if not row.stale
        ]
        self._stats.discarded_rows += len(scheduled) - len(landed)
        return landed

    def take(self, row: Scheduled, answer: RowResult) -> Gain | None:
        """Moves the row's sequence on. None: a chunk of a prompt that is not done. A row that is
        not finite moves nothing and finishes with "error"."""
        seq = row.sequence
        if not answer.finite or (row.samples and not 0 <= answer.token < self._vocab_size):
            self._stats.nonfinite_rows += 1
            return Gain(seq, finish="error")
        seq.computed += row.num_new
        if row.samples:
            seq.pending.popleft()
            seq.ids.append(answer.token)
            self._stats.generated_tokens += 1
        if seq.wants_prompt_logprobs:
            seq.prompt_logprobs += answer.prompt_logprobs
        if not row.samples and (seq.limit > 0 or seq.computed < len(seq.ids)):
            return None
        prompt_logprobs = tuple(seq.prompt_logprobs)
        seq.prompt_logprobs.clear()
        seq.wants_prompt_logprobs = False
        finish = ""
        stopped = row.samples and answer.token in seq.stop_ids
        if stopped:
            finish = "stop"
        elif seq.num_output >= seq.limit:
            finish = "length"
        elif seq.num_output >= seq.until:
            finish = "handover"
        return Gain(
            seq,
            ids=(answer.token,) if row.samples else (),
            logprobs=(answer.logprobs,) if answer.logprobs else (),
            finish=finish,
            stop_token=answer.token if stopped else -1,
            prompt_logprobs=prompt_logprobs,
        )

    def clear(self) -> None:
        """The Runner is gone: nothing comes back, nothing needs to be told."""
        self._steps.clear()
        self._ended_handles.clear()

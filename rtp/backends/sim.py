"""A Runner without a model: tokens by rule, seconds by formula.

Pages hold token ids, each with a digest of all tokens before it, as real keys and values depend on
them: a slot read behind another prefix reads as another token. The next token is a hash of every
token that a row reads through its page table (and of seed, choice and index where the temperature
is above 0), so that a page that is shared wrongly, stale or never written changes the output. All
rows of a step read before any of them writes: a block that is shared in the step that fills it
shows as well. `expected_tokens` computes the right output from the prompt alone.

Seconds by core/cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import xxhash

from rtp.core.cost import Cost
from rtp.core.errors import ShapeError
from rtp.core.ports import Capacity, Runner
from rtp.core.steps import (
    Known,
    Received,
    Row,
    RowResult,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from rtp.core.types import SamplingParams

UNWRITTEN = -1
DIGEST_BASE = 0x9E3779B97F4A7C15
STEPS_REMEMBERED = 8


def build(
    *,
    num_blocks: int = 2048,
    block_size: int = 16,
    max_model_len: int = 8192,
    vocab_size: int = 32000,
    eos_ids: Sequence[int] = (2,),
    a: float = 0.004,
    b: float = 1.0e-3,
    c: float = 2.5e-7,
    d: float = 0.015,
    e: float = 0.8e-3,
    f: float = 8.0e-7,
    eos_every: int = 0,
    nonfinite_token: int = -1,
    realtime: bool = False,
    contents: bool = True,
) -> Runner:
    """Defaults: seconds of a 135M model on two CPU cores.  eos_every: one token in so many is an
    EOS, 0 for none.  nonfinite_token: a row that reads this id is not finite; nor is one that reads
    an unwritten slot.  realtime: execute() takes as long as it says.  contents: False where only
    time counts: pages hold nothing, every token is the same."""
    capacity = Capacity(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_ids=tuple(eos_ids),
        kv_format="sim",
    )
    cost = Cost(a, b, c, d, e, f)
    if not contents:
        return TimeRunner(capacity, cost, realtime)
    return SimRunner(
        capacity, Rule(vocab_size, tuple(eos_ids), eos_every), cost, nonfinite_token, realtime
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """Which token follows a context."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    eos_every: int = 0

    def next_token(
        self,
        context: bytes,
        sampling: SamplingParams,
        choice: int,
        index: int,
        stop_ids: tuple[int, ...] = (),
    ) -> int:
        """context: int32 ids of all tokens so far.  index: of the output token.  stop_ids are
        passed over before `sampling.min_tokens` outputs exist."""
        salt = f":{sampling.seed}:{choice}:{index}" if sampling.temperature > 0 else ""
        barred = stop_ids if index < sampling.min_tokens else ()
        return next(token for token in self._draws(context + salt.encode()) if token not in barred)

    def _draws(self, data: bytes) -> Iterator[int]:
        for attempt in count():
            value = xxhash.xxh64_intdigest(data, seed=attempt)
            if self.eos_ids and self.eos_every and value % self.eos_every == 0:
                yield self.eos_ids[0]
            token = (value >> 16) % self.vocab_size
            if token not in self.eos_ids:
                yield token


def expected_tokens(
    rule: Rule,
    prompt: Sequence[int],
    sampling: SamplingParams,
    choice: int = 0,
    output: Sequence[int] = (),
) -> list[int]:
    """The whole right output of a choice that has already produced `output`."""
    stop_ids = sampling.stop_token_ids + (() if sampling.ignore_eos else rule.eos_ids)
    out = list(output)
    while len(out) < sampling.max_tokens and not (out and out[-1] in stop_ids):
        context = np.array([*prompt, *out], dtype="<i4").tobytes()
        out.append(rule.next_token(context, sampling, choice, len(out), stop_ids))
    return out


class TimeRunner:
    """Seconds by formula, and a token that ends nothing for every row that samples."""

    def __init__(self, capacity: Capacity, cost: Cost, realtime: bool = False) -> None:
        self.capacity = capacity
        self._cost = cost
        self._realtime = realtime
        # The last one: the first ones of a vocabulary are special and have no text.
        token = next(t for t in count(capacity.vocab_size - 1, -1) if t not in capacity.eos_ids)
        self._sampled = RowResult(token=token)
        self._silent = RowResult()

    def execute(self, plan: StepPlan) -> StepResult:
        rows = tuple(self._sampled if row.output_index >= 0 else self._silent for row in plan.rows)
        elapsed_s = self._cost.empty_s if plan.dummy else self._cost.step_s(plan.rows)
        if self._realtime:
            time.sleep(elapsed_s)
        return StepResult(plan.step, rows, elapsed_s)

    def close(self) -> None:
        """Nothing is held."""


class SimRunner:
    """See the module's text. Keeps of a sequence what SequenceStart says, nothing else."""

    def __init__(
        self, capacity: Capacity, rule: Rule, cost: Cost, nonfinite_token: int, realtime: bool
    ) -> None:
        self.capacity = capacity
        self._rule = rule
        self._cost = cost
        self._nonfinite_token = nonfinite_token
        self._realtime = realtime
        shape = (capacity.num_blocks, capacity.block_size)
        self._pages = np.full(shape, UNWRITTEN, dtype="<i4")
        self._digests = np.zeros(shape, dtype=np.uint64)
        self._powers = np.cumprod(np.full(capacity.max_model_len, DIGEST_BASE, dtype=np.uint64))
        self._sequences: dict[int, SequenceStart] = {}
        self._sampled: dict[int, tuple[RowResult, ...]] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises ShapeError where a row's pages do not fit its tokens."""
        for handle in plan.ended:
            del self._sequences[handle]
        for start in plan.started:
            self._sequences[start.sequence] = start
        for received in plan.received:
            self._fill(received)
        contexts = [self._read(row) for row in plan.rows]
        results = tuple(
            self._answer(row, context) for row, context in zip(plan.rows, contexts, strict=True)
        )
        for row, context in zip(plan.rows, contexts, strict=True):
            self._write(row, context)
        self._sampled[plan.step] = results
        self._sampled.pop(plan.step - STEPS_REMEMBERED, None)
        elapsed_s = self._cost.empty_s if plan.dummy else self._cost.step_s(plan.rows)
        if self._realtime:
            time.sleep(elapsed_s)
        return StepResult(plan.step, results, elapsed_s)

    def close(self) -> None:
        self._sequences.clear()

    def _read(self, row: Row) -> npt.NDArray[np.int32]:
        """int32 [start + num_new]: everything the row attends to, its own new tokens last."""
        table = np.frombuffer(row.pages, dtype="<i4")
        if len(table) != -(-(row.start + row.num_new) // self.capacity.block_size):
            raise ShapeError(f"{len(table)} pages for {row.start + row.num_new} tokens")
        if isinstance(row.inputs, Known):
            new = np.frombuffer(row.inputs.ids, dtype="<i4")
        else:
            new = np.array([self._sampled[row.inputs.step][row.inputs.row].token], dtype="<i4")
        if len(new) != row.num_new:
            raise ShapeError(f"{len(new)} ids for {row.num_new} tokens")
        held = self._pages[table].reshape(-1)[: row.start]
        digests = self._digests[table].reshape(-1)[: row.start]
        misplaced = (digests != self._prefix_digests(held)) & (held != UNWRITTEN)
        return np.concatenate([held + misplaced.astype("<i4"), new])

    def _write(self, row: Row, context: npt.NDArray[np.int32]) -> None:
        table = np.frombuffer(row.pages, dtype="<i4")
        self._put(context, row.start, table, 0)

    def _fill(self, received: Received) -> None:
        """What a transfer would have brought: this sequence's tokens, each behind all before it."""
        context = np.frombuffer(received.ids, dtype="<i4")
        table = np.frombuffer(received.pages, dtype="<i4")
        self._put(context, received.start, table, received.start // self.capacity.block_size)

    def _put(
        self,
        context: npt.NDArray[np.int32],
        start: int,
        table: npt.NDArray[np.int32],
        first_block: int,
    ) -> None:
        """Writes context[start:]; table[0] is the page of block `first_block`."""
        positions = np.arange(start, len(context))
        size = self.capacity.block_size
        slots = table[positions // size - first_block], positions % size
        self._pages[slots] = context[start:]
        self._digests[slots] = self._prefix_digests(context)[start:]

    def _prefix_digests(self, context: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """Of context[: i + 1] at i: a polynomial modulo 2**64."""
        terms = (context.astype(np.uint64) + np.uint64(1)) * self._powers[: len(context)]
        return np.cumsum(terms, dtype=np.uint64)

    def _answer(self, row: Row, context: npt.NDArray[np.int32]) -> RowResult:
        if (context == self._nonfinite_token).any() or (context == UNWRITTEN).any():
            return RowResult(finite=False)
        start = self._sequences[row.sequence]
        token, logprobs = -1, None
        if row.output_index >= 0:
            data = context.tobytes()
            token = self._rule.next_token(
                data, start.sampling, start.choice, row.output_index, start.stop_ids
            )
            if start.sampling.logprobs is not None:
                logprobs = self._logprobs(data, token, start.sampling.logprobs)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if row.prompt_logprobs >= 0:
            prompt = np.frombuffer(start.prompt, dtype="<i4")
            last = min(row.start + row.num_new, len(prompt) - 1)
            prompt_logprobs = tuple(
                self._logprobs(
                    context[: position + 1].tobytes(),
                    int(prompt[position + 1]),
                    row.prompt_logprobs,
                )
                for position in range(row.start, last)
            )
        return RowResult(token=token, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _logprobs(self, context: bytes, token: int, num_top: int) -> TokenLogprobs:
        """Made-up but lawful values: alternatives best first, the chosen token's own bit-equal."""
        values = {
            other: float(np.float32(-1.0 - rank))
            for rank, other in enumerate(self._alternatives(context, num_top))
        }
        logprob = values.get(token, float(np.float32(-20.0)))
        return TokenLogprobs(token, logprob, tuple(values), tuple(values.values()))

    def _alternatives(self, context: bytes, num_top: int) -> list[int]:
        base = xxhash.xxh64_intdigest(context)
        size = self.capacity.vocab_size
        return [(base + rank) % size for rank in range(min(num_top, size))]

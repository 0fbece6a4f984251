"""StepPlan and StepResult: plain data, the whole contract between a batcher and a Runner.

A plan lists rows. A row computes `num_new` tokens of one sequence, from position `start` on, and
may sample one token after the last of them. Its input is `Known` (token ids the batcher has) or
`FromStep` (the token that an earlier step, perhaps still running, samples for one of its rows), so
that one or two steps can be in flight. Plans of a rank run in the order of their step numbers.

The Runner keeps per sequence only what sampling needs (parameters, seen tokens): a sequence is
announced in `started` of the first plan that has a row for it and forgotten with `ended`. A
preempted sequence is ended and later started again, under a new handle, with all its output so far.
"""

from __future__ import annotations

import msgspec

from rtp.core.types import Ids, SamplingParams


class SequenceStart(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a Runner must know of a sequence to sample for it."""

    sequence: int
    """Handle, unique on this rank for the life of the process."""
    choice: int
    """Choice number of the request; part of the sampling counter."""
    prompt: Ids
    output: Ids
    """Tokens generated so far (before a preemption or on another worker)."""
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    """Ids that must not be sampled before `sampling.min_tokens` outputs exist (EOS and stop
    ids)."""


class FromStep(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """The single input token is what row `row` of step `step` sampled."""

    step: int
    row: int


class Known(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    """The input tokens themselves, int32 [num_new]."""

    ids: Ids


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One sequence's share of a step."""

    sequence: int
    start: int
    """Position of the first new token = tokens of this sequence already in the pages."""
    num_new: int
    inputs: Known | FromStep
    pages: bytes
    """int32 [ceil((start + num_new) / block_size)]: page ids of the sequence from position 0 on."""
    output_index: int
    """Index of the output token sampled after the last new token; -1: the row does not sample."""
    prompt_logprobs: int = -1
    """>= 0: also return the log-probability of prompt token p+1 for every new position p that has
    one, with that many alternatives."""


class Received(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Pages that a Transport filled. For a Runner whose pages a Transport writes this is no more
    than news; one whose pages follow from the tokens (sim) fills them now, before the rows."""

    start: int
    """Position of the first token received."""
    ids: Ids
    """Tokens of positions 0 .. to the last one received."""
    pages: bytes
    """int32: the pages of positions `start` and on."""


class StepPlan(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One step of one rank. Never empty of rows unless it is a dummy or only ends sequences."""

    step: int
    rows: tuple[Row, ...]
    started: tuple[SequenceStart, ...] = ()
    ended: tuple[int, ...] = ()
    dummy: bool = False
    """Without rows, while other ranks of a lock-step group have some: the Runner takes its part in
    what ranks compute together, changes no page, samples nothing, and takes no less time than an
    empty step does."""
    received: tuple[Received, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Natural-log probabilities at one position, of the model's raw distribution (float32 values).

    `logprob` belongs to `token`. `top_ids`/`top_logprobs` are the alternatives asked for, best
    first; where the chosen token is among them its value is bit-equal to `logprob`."""

    token: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class RowResult(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What one row of the plan produced."""

    token: int = -1
    """Sampled token id; -1 where the row does not sample or is not finite."""
    finite: bool = True
    """Every hidden state and logit of the row was finite. False: the request fails, its new blocks
    are not shared."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For positions start+1 .. , in order: the prompt token at that position given all before
    it."""


class StepResult(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The outcome of a StepPlan, rows in the plan's order."""

    step: int
    rows: tuple[RowResult, ...]
    elapsed_s: float

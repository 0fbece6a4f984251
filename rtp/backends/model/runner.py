"""ModelRunner: a StepPlan through inputs, model, checks and sampler to a StepResult."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rtp.backends.model.attention import AttentionBackend
from rtp.backends.model.inputs import StepInputs, build_inputs
from rtp.backends.model.kv_pool import KVPool
from rtp.backends.model.logprobs import prompt_logprobs, token_logprobs
from rtp.backends.model.sampler import sample
from rtp.backends.model.sequences import Sequence
from rtp.backends.models.llama import Decoder
from rtp.core.ports import Capacity
from rtp.core.steps import Row, RowResult, StepPlan, StepResult, TokenLogprobs

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_KEPT_STEPS = 3
"""Steps whose sampled tokens later plans may still name."""


class ModelRunner:
    """A Runner over a decoder and an attention backend that share one device.

    Sampled tokens stay here until a FromStep input asks for them. A row is finite while every
    hidden state it computed and every logit it sampled from is; one that is not gives token -1
    and leaves the other rows as they are.
    """

    def __init__(
        self, model: Decoder, pool: KVPool, attention: AttentionBackend, capacity: Capacity
    ):
        self.capacity = capacity
        self.pool = pool
        """Pages of this rank, for whoever moves them between steps."""
        self._model = model
        self._attention = attention
        self._sequences: dict[int, Sequence] = {}
        self._sampled: dict[int, Int64] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        begun = perf_counter()
        for start in plan.started:
            self._sequences[start.sequence] = Sequence(start)
        rows = self._run(plan) if plan.rows else ()
        for handle in plan.ended:
            self._sequences.pop(handle, None)
        return StepResult(step=plan.step, rows=rows, elapsed_s=perf_counter() - begun)

    def close(self) -> None:
        self._sequences.clear()
        self._sampled.clear()

    def _run(self, plan: StepPlan) -> tuple[RowResult, ...]:
        inputs = build_inputs(plan, self.capacity.block_size)
        finite = self._take_borrowed(inputs)
        self._attention.plan(inputs)
        hidden = self._model.forward(
            torch.from_numpy(inputs.ids), torch.from_numpy(inputs.positions), self._attention
        )
        finite &= _finite_rows(hidden, inputs)
        tokens, logprobs = self._sample(plan.rows, hidden, inputs, finite)
        self._remember(plan.step, tokens)
        return tuple(
            RowResult(
                token=int(token),
                finite=bool(is_finite),
                logprobs=logprobs.get(index),
                prompt_logprobs=self._score_prompt(row, hidden, int(first)) if is_finite else (),
            )
            for index, (row, token, is_finite, first) in enumerate(
                zip(plan.rows, tokens, finite, inputs.qo_indptr, strict=False)
            )
        )

    def _take_borrowed(self, inputs: StepInputs) -> Bools:
        """Fills in ids sampled by earlier steps. False for a row whose token does not exist because
        the row that should have sampled it was not finite."""
        finite = np.ones(len(inputs.seq_lens), dtype=np.bool_)
        for row, source in inputs.borrowed:
            token = self._sampled[source.step][source.row]
            finite[row] = token >= 0
            inputs.ids[inputs.qo_indptr[row]] = max(token, 0)
        return finite

    def _sample(
        self, rows: tuple[Row, ...], hidden: Tensor, inputs: StepInputs, finite: Bools
    ) -> tuple[Int64, dict[int, TokenLogprobs]]:
        """Tokens of all rows (-1: none) and log-probabilities by row; finds non-finite logits."""
        tokens = np.full(len(rows), -1, dtype=np.int64)
        wanted = [i for i, row in enumerate(rows) if row.output_index >= 0 and finite[i]]
        if not wanted:
            return tokens, {}
        last = inputs.qo_indptr[1:][wanted].astype(np.int64) - 1
        logits = self._model.logits(hidden[torch.from_numpy(last)])
        whole = np.isfinite(logits.sum(-1).numpy())
        if not whole.all():
            finite[wanted] = whole
            wanted = [i for i in wanted if finite[i]]
            logits = logits[torch.from_numpy(whole)]
        if not wanted:
            return tokens, {}
        sequences = [self._sequences[rows[i].sequence] for i in wanted]
        chosen = sample(logits, sequences, [rows[i].output_index for i in wanted])
        tokens[wanted] = chosen
        for sequence, token in zip(sequences, chosen.tolist(), strict=True):
            sequence.push(token)
        counts = [sequence.sampling.logprobs for sequence in sequences]
        asked = [at for at, count in enumerate(counts) if count is not None]
        if not asked:
            return tokens, {}
        found = token_logprobs(logits[asked], chosen[asked], [counts[at] or 0 for at in asked])
        return tokens, {wanted[at]: entry for at, entry in zip(asked, found, strict=True)}

    def _score_prompt(self, row: Row, hidden: Tensor, first: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt tokens that follow the row's new positions."""
        if row.prompt_logprobs < 0:
            return ()
        prompt = self._sequences[row.sequence].prompt
        targets = prompt[row.start + 1 : row.start + 1 + row.num_new]
        states = hidden[first : first + len(targets)]
        scores = prompt_logprobs(states, targets, row.prompt_logprobs, self._model.logits)
        return tuple(scores)

    def _remember(self, step: int, tokens: Int64) -> None:
        self._sampled[step] = tokens
        while len(self._sampled) > _KEPT_STEPS:
            del self._sampled[next(iter(self._sampled))]


def _finite_rows(hidden: Tensor, inputs: StepInputs) -> Bools:
    """[B]: whether all of a row's hidden states [N, H] are finite."""
    whole = np.isfinite(hidden.abs().amax(-1).float().numpy())
    rows: Bools = np.logical_and.reduceat(whole, inputs.qo_indptr[:-1])
    return rows

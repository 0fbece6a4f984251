"""Both sides of the contract of core/steps: plans are checked, and a batcher is played."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rtp.core.ports import Runner
from rtp.core.steps import (
    FromStep,
    Known,
    Row,
    RowResult,
    SequenceStart,
    StepPlan,
    StepResult,
)
from rtp.core.types import SamplingParams, pack_ids

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


class CheckedRunner:
    """Holds every plan to the contract of core/steps before the Runner gets it."""

    def __init__(self, runner: Any) -> None:  # Any: tests look into the one they made
        self.runner = runner
        self.capacity = runner.capacity
        self.plans: list[StepPlan] = []
        self._known: set[int] = set()
        self._max_tokens: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        size = self.capacity.block_size
        assert not self.plans or plan.step == self.plans[-1].step + 1
        assert bool(plan.rows) != plan.dummy
        self._known -= set(plan.ended)
        for start in plan.started:
            assert start.sequence not in self._max_tokens, "a handle is used twice"
            self._known.add(start.sequence)
            self._max_tokens[start.sequence] = start.sampling.max_tokens
        written: dict[int, int] = {}
        for row in plan.rows:
            assert row.sequence in self._known
            assert row.num_new >= 1
            assert row.start + row.num_new <= self.capacity.max_model_len
            assert row.output_index < max(1, self._max_tokens[row.sequence])
            if isinstance(row.inputs, Known):
                assert len(row.inputs.ids) == 4 * row.num_new
            for page in np.frombuffer(row.pages, "<i4")[row.start // size :].tolist():
                assert page not in written, "two rows write one page"
                written[page] = row.sequence
        assert len({row.sequence for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            pages = np.frombuffer(row.pages, "<i4").tolist()
            assert len(set(pages)) == len(pages), "a page twice in one table"
            assert all(0 <= page < self.capacity.num_blocks for page in pages)
            read = [page for page in pages if written.get(page, row.sequence) != row.sequence]
            assert not read, "a row reads a page that another row of the step writes"
        self.plans.append(plan)
        return self.runner.execute(plan)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: what it is, how far it is computed, what its rows gave."""

    handle: int
    prompt: list[int]
    sampling: SamplingParams
    start: SequenceStart
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    num_sampled: int = 0
    last_row: FromStep | None = None
    results: list[RowResult] = field(default_factory=list)
    announced: bool = False

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are not in the pages yet."""
        return len(self.prompt) + self.num_sampled - self.computed


class Driver:
    """Plays the batcher for a Runner under test: hands out pages, plans steps, collects tokens.

    blind: decode inputs are named by the step that samples them, as with steps in flight. Of one
    Runner only the last Driver may be used: each counts steps and handles from the start.
    """

    def __init__(self, runner: Runner, blind: bool = False, seed: int = 0):
        self.runner = CheckedRunner(runner)
        self.blind = blind
        self.step = 0
        pages = np.random.default_rng(seed).permutation(runner.capacity.num_blocks)
        self._free: list[int] = pages.tolist()
        self._handles = 0
        self._ended: list[int] = []

    def begin(
        self,
        prompt: Iterable[int],
        sampling: SamplingParams = GREEDY,
        *,
        choice: int = 0,
        output: Sequence[int] = (),
        stop_ids: tuple[int, ...] = (),
        shares: Request | None = None,
    ) -> Request:
        """A new sequence. output: resumed with these. shares: its whole pages of an equal prefix
        are used, but for the last token, which is always computed."""
        self._handles += 1
        ids = list(prompt)
        start = SequenceStart(
            self._handles, choice, pack_ids(ids), pack_ids(output), sampling, stop_ids
        )
        request = Request(self._handles, ids, sampling, start, list(output))
        request.num_sampled = len(output)
        if shares is not None:
            size = self.runner.capacity.block_size
            equal = 0
            for mine, theirs in zip(ids[:-1], shares.prompt[: shares.computed], strict=False):
                if mine != theirs:
                    break
                equal += 1
            request.computed = equal // size * size
            request.pages = shares.pages[: equal // size]
        return request

    def end(self, *requests: Request, keep: int = 0) -> None:
        """Forgets sequences; pages from the keep-th on are handed out again, most recent first."""
        for request in requests:
            self._free = request.pages[keep:] + self._free
            self._ended.append(request.handle)

    def advance(self, work: Sequence[tuple[Request, int]], prompt_logprobs: int = -1) -> None:
        """One step in which each request computes that many tokens."""
        rows, started = [], []
        for request, num_new in work:
            if not request.announced:
                started.append(request.start)
                request.announced = True
            rows.append(self._row(request, num_new, prompt_logprobs))
        plan = StepPlan(self.step, tuple(rows), tuple(started), tuple(self._ended))
        self._ended.clear()
        result = self.runner.execute(plan)
        assert (result.step, len(result.rows)) == (self.step, len(rows))
        for at, ((request, num_new), row) in enumerate(zip(work, result.rows, strict=True)):
            request.results.append(row)
            request.computed += num_new
            if rows[at].output_index >= 0:
                request.output.append(row.token)
                request.num_sampled += 1
                request.last_row = FromStep(self.step, at)
        self.step += 1

    def dummy(self) -> StepResult:
        """A step for other ranks; it ends what has ended."""
        plan = StepPlan(self.step, (), ended=tuple(self._ended), dummy=True)
        self._ended.clear()
        self.step += 1
        result = self.runner.execute(plan)
        assert result.step == plan.step
        assert result.elapsed_s >= 0
        return result

    def run(self, requests: Sequence[Request], num_outputs: int, chunk: int = 1 << 30) -> None:
        """Steps until each request has num_outputs tokens, at most `chunk` new tokens of one."""
        while waiting := [r for r in requests if r.num_sampled < num_outputs]:
            self.advance([(r, min(chunk, r.remaining)) for r in waiting])

    def _row(self, request: Request, num_new: int, prompt_logprobs: int) -> Row:
        first, last = request.computed, request.computed + num_new
        size = self.runner.capacity.block_size
        while len(request.pages) * size < last:
            request.pages.append(self._free.pop(0))
        known = request.prompt + request.output
        inputs: FromStep | Known = Known(pack_ids(known[first:last]))
        if self.blind and request.last_row is not None and first >= len(request.prompt):
            inputs = request.last_row
        samples = last == len(request.prompt) + request.num_sampled
        return Row(
            request.handle,
            first,
            num_new,
            inputs,
            pack_ids(request.pages[: -(-last // size)]),
            request.num_sampled if samples else -1,
            prompt_logprobs,
        )

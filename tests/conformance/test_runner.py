"""What every Runner promises (core/ports, core/steps), run over all backends that make one.

Plans come from the driver of tests/support/runners, which holds them to the contract too. Models
are tiny, random and in fp32, where the order of sums does not change a greedy choice but for near
ties, of which these prompts have none. A backend that cannot run here is skipped with the reasons
of its check(); one that needs a CUDA device is to carry the mark gpu as well.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from rtp.core import plugins
from rtp.core.ports import Capacity, Runner
from rtp.core.steps import RowResult, StepPlan
from rtp.core.types import SamplingParams
from tests.support.checkpoints import VOCAB_SIZE, poisoned_checkpoint, tiny_checkpoint
from tests.support.runners import GREEDY, Driver, Request

RUNNERS = [
    name
    for name in plugins.names("backend")
    if hasattr(get_type_hints(plugins.module("backend", name).build)["return"], "execute")
]
NUM_OUTPUT = 8
BLOCK = 16
POISON = 3
"""The id that makes its row not finite, where a Runner was built `poisoned`."""


def a_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(POISON + 1, VOCAB_SIZE), k=length)


PROMPTS = [a_prompt(seed, length) for seed, length in enumerate((1, 5, 16, 17, 40, 90))]
HEAD = a_prompt(9, 70)
FAMILY = [HEAD + a_prompt(10, 3), HEAD + a_prompt(11, 20), HEAD, [*HEAD, 5]]
"""The same first 64 tokens."""


class Backend:
    """One backend, built small, and what it answers to each prompt alone."""

    def __init__(self, name: str, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._build = plugins.module("backend", name).build
        self._known = inspect.signature(self._build).parameters
        self._alone: dict[tuple[int, ...], list[int]] = {}

    def build(self, *, poisoned: bool = False, eager: bool = False) -> Runner:
        """poisoned: see POISON.  eager: a simulated model always answers with its EOS."""
        params: dict[str, object] = {"num_blocks": 128, "block_size": BLOCK}
        if "checkpoint" in self._known:
            params["checkpoint"] = self._poisoned if poisoned else self._checkpoint
            params["dtype"] = "fp32"
        else:
            params |= {"vocab_size": VOCAB_SIZE, "max_model_len": 512}
            params |= {"nonfinite_token": POISON} if poisoned else {}
            params |= {"eos_every": 1} if eager else {}
        runner: Runner = self._build(**params)
        return runner

    def alone(self, prompt: list[int]) -> list[int]:
        """NUM_OUTPUT greedy tokens: one prefill, then one row a step."""
        key = tuple(prompt)
        if key not in self._alone:
            driver = Driver(self.build())
            request = driver.begin(prompt)
            driver.run([request], NUM_OUTPUT)
            self._alone[key] = request.output
        return self._alone[key]

    @cached_property
    def _checkpoint(self) -> Path:
        return tiny_checkpoint(self._tmp_path, "llama")

    @cached_property
    def _poisoned(self) -> Path:
        return poisoned_checkpoint(self._tmp_path / "poisoned", "llama", POISON)


@pytest.fixture(scope="module", params=RUNNERS)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    reasons = plugins.check("backend", request.param)
    if reasons:
        pytest.skip("; ".join(reasons))
    return Backend(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=[False, True], ids=["known", "in-flight"])
def driver(backend: Backend, request: pytest.FixtureRequest) -> Driver:
    """Inputs are Known, or FromStep wherever they can be."""
    return Driver(backend.build(), blind=request.param)


def test_the_runners_of_the_tree_are_found():
    assert {"sim", "torch_cpu"} <= set(RUNNERS)


# ---------------------------------------------------------------- one answer, however planned


def in_one_batch(driver: Driver) -> list[Request]:
    requests = [driver.begin(prompt) for prompt in PROMPTS]
    driver.run(requests, NUM_OUTPUT)
    return requests


def in_chunks(driver: Driver) -> list[Request]:
    requests = [driver.begin(prompt) for prompt in PROMPTS]
    driver.run(requests, NUM_OUTPUT, chunk=7)
    return requests


def arriving_one_by_one(driver: Driver) -> list[Request]:
    """Prefills and decodes share steps; the last come in chunks."""
    requests: list[Request] = []
    for prompt in PROMPTS:
        requests.append(driver.begin(prompt))
        driver.advance([(request, min(33, request.remaining)) for request in requests])
    driver.run(requests, NUM_OUTPUT, chunk=33)
    return requests


def taking_turns(driver: Driver) -> list[Request]:
    """With two steps in flight an input may be what the step before the last samples."""
    requests = [driver.begin(prompt) for prompt in PROMPTS]
    halves = (requests[::2], requests[1::2])
    for turn in range(2 * NUM_OUTPUT):
        driver.advance([(request, request.remaining) for request in halves[turn % 2]])
    return requests


def over_shared_pages(driver: Driver) -> list[Request]:
    """Others start from the pages of the first, which goes on and ends before they do."""
    first = driver.begin(FAMILY[0])
    driver.advance([(first, first.remaining)])
    others = [driver.begin(prompt, shares=first) for prompt in FAMILY[1:]]
    assert {request.computed for request in others} == {64}
    driver.run([first, *others], NUM_OUTPUT - 2)
    driver.run([first], NUM_OUTPUT)
    driver.end(first, keep=4)
    driver.run(others, NUM_OUTPUT)
    return [first, *others]


def backwards(driver: Driver) -> list[Request]:
    """Each step has its rows in the other order than the step before."""
    requests = [driver.begin(prompt) for prompt in PROMPTS]
    for step in range(NUM_OUTPUT):
        order = requests[:: 1 if step % 2 else -1]
        driver.advance([(request, request.remaining) for request in order])
    return requests


@pytest.mark.parametrize(
    "play",
    [in_one_batch, in_chunks, arriving_one_by_one, taking_turns, over_shared_pages, backwards],
)
def test_greedy_output_does_not_depend_on_how_work_is_planned(
    backend: Backend, driver: Driver, play: Callable[[Driver], list[Request]]
):
    requests = play(driver)
    assert len(requests) >= 4
    for request in requests:
        assert request.output[:NUM_OUTPUT] == backend.alone(request.prompt)


def test_results_are_in_the_order_of_the_rows(backend: Backend):
    answers = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        driver = Driver(backend.build())
        requests = [driver.begin(prompt) for prompt in PROMPTS[2:]]
        work = [(requests[i], requests[i].remaining - (i == 3)) for i in order]
        driver.advance(work)
        answers.append([(request.results[0].token, request.output) for request in requests])
    assert answers[0] == answers[1]
    assert [token < 0 for token, _ in answers[0]] == [False, False, False, True]


def test_a_preempted_sequence_goes_on_under_a_new_handle(backend: Backend, driver: Driver):
    """Its output so far is told at its start; its old pages may hold anything by then."""
    sampling = SamplingParams(
        max_tokens=99, temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.5
    )
    whole = driver.begin(PROMPTS[4], sampling)
    driver.run([whole], NUM_OUTPUT)
    cut = driver.begin(PROMPTS[4], sampling)
    driver.run([cut], 3)
    driver.end(cut)
    again = driver.begin(PROMPTS[4], sampling, output=cut.output)
    driver.run([again], NUM_OUTPUT, chunk=9)
    assert again.handle != cut.handle
    assert again.output == whole.output


# ---------------------------------------------------------------- sampling


def drawn(driver: Driver, *, seed: int = 1, choice: int = 0, among: int = 0) -> list[int]:
    """NUM_OUTPUT tokens of one prompt at temperature 1, with others in the batch."""
    hot = SamplingParams(max_tokens=99, temperature=1.0, seed=seed)
    others = [
        driver.begin(PROMPTS[i], SamplingParams(max_tokens=99, temperature=1.0, seed=seed + i))
        for i in range(among)
    ]
    request = driver.begin(PROMPTS[3], hot, choice=choice)
    driver.run([*others, request], NUM_OUTPUT, chunk=5 if among else 1 << 30)
    driver.end(*others, request)
    return request.output


def test_draws_depend_on_seed_choice_and_index_only(driver: Driver):
    alone = drawn(driver)
    assert drawn(driver, among=4) == alone
    assert drawn(driver) == alone
    assert drawn(driver, seed=2) != alone
    assert drawn(driver, choice=1) != alone
    assert drawn(driver, choice=1, among=2) == drawn(driver, choice=1)
    # Resumed at output 3, under another handle: the draws from 3 on are those of the whole.
    hot = SamplingParams(max_tokens=99, temperature=1.0, seed=1)
    resumed = driver.begin(PROMPTS[3], hot, output=alone[:3])
    driver.run([resumed], NUM_OUTPUT)
    assert resumed.output == alone


def test_equal_rows_of_one_step_draw_alike_and_unequal_indices_do_not(driver: Driver):
    hot = SamplingParams(max_tokens=999, temperature=1000.0, seed=7)
    twins = [driver.begin(PROMPTS[4], hot) for _ in range(2)]
    driver.run(twins, NUM_OUTPUT)
    assert twins[0].output == twins[1].output
    assert len(set(twins[0].output)) > NUM_OUTPUT // 2


def test_a_row_without_an_output_index_samples_nothing(backend: Backend):
    scored = SamplingParams(max_tokens=99, temperature=1.0, logprobs=2)
    driver = Driver(backend.build())
    chunked, whole = driver.begin(PROMPTS[4], scored), driver.begin(PROMPTS[2], scored)
    driver.advance([(chunked, 30), (whole, whole.remaining)])
    assert chunked.results == [RowResult()]
    assert whole.results[0].token >= 0
    driver.advance([(chunked, 10)])
    assert chunked.results[1].token >= 0


def test_stop_ids_are_not_sampled_before_min_tokens(backend: Backend):
    runner = backend.build(eager=True)
    stop_ids = runner.capacity.eos_ids
    sampling = SamplingParams(
        max_tokens=99, min_tokens=3, temperature=1.0, logit_bias={stop_ids[0]: 100.0}
    )
    driver = Driver(runner)
    request = driver.begin(PROMPTS[4], sampling, stop_ids=stop_ids)
    driver.run([request], 5)
    assert not set(request.output[:3]) & set(stop_ids)
    assert request.output[3] == stop_ids[0]


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_l02_the_chosen_value_is_bit_equal_among_the_best(backend: Backend, temperature: float):
    scored = SamplingParams(max_tokens=99, temperature=temperature, logprobs=VOCAB_SIZE)
    driver = Driver(backend.build())
    request, plain = driver.begin(PROMPTS[4], scored), driver.begin(PROMPTS[3])
    driver.run([request, plain], NUM_OUTPUT)
    for row in request.results:
        entry = row.logprobs
        assert entry is not None
        assert entry.token == row.token
        assert sorted(entry.top_ids) == list(range(VOCAB_SIZE))
        assert entry.logprob == dict(zip(entry.top_ids, entry.top_logprobs, strict=True))[row.token]
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
        assert all(np.float32(value) == value for value in entry.top_logprobs)
    assert all(row.logprobs is None for row in plain.results)


def scores(backend: Backend, chunk: int, alternatives: int) -> list[tuple[int, float, object]]:
    driver = Driver(backend.build())
    request = driver.begin(PROMPTS[5])
    while request.num_sampled < 2:  # one decode row on top: it has no prompt token to score
        driver.advance([(request, min(chunk, request.remaining))], prompt_logprobs=alternatives)
    found = [entry for row in request.results for entry in row.prompt_logprobs]
    assert {len(entry.top_ids) for entry in found} == {alternatives}
    assert {len(entry.top_logprobs) for entry in found} == {alternatives}
    return [(entry.token, entry.logprob, entry.top_ids) for entry in found]


@pytest.mark.parametrize("alternatives", [0, 3])
@pytest.mark.parametrize("chunk", [1, 16, 33])
def test_l01_prompt_scores_are_the_same_in_whatever_chunks(
    backend: Backend, chunk: int, alternatives: int
):
    """One for every prompt token but the first. Sums in another order may differ by a few of the
    24 bits of a float32, at values up to about 30."""
    whole, cut = scores(backend, 1 << 30, alternatives), scores(backend, chunk, alternatives)
    assert [token for token, _, _ in cut] == PROMPTS[5][1:]
    assert [entry[::2] for entry in cut] == [entry[::2] for entry in whole]
    values = [value for _, value, _ in whole]
    assert [value for _, value, _ in cut] == pytest.approx(values, abs=1e-4)


# ---------------------------------------------------------------- ends and faults


def test_ended_sequences_leave_no_trace(backend: Backend, driver: Driver):
    """Their pages are the next one's at once, in the plan that ends them; neighbours go on."""
    going = driver.begin(PROMPTS[4])
    driver.advance([(going, going.remaining)])
    for seed in range(4):
        brief = driver.begin(a_prompt(20 + seed, 100), SamplingParams(max_tokens=9, logprobs=1))
        driver.advance([(brief, brief.remaining), (going, 1)])
        driver.end(brief)
    last = driver.begin(PROMPTS[5])
    driver.run([last, going], NUM_OUTPUT)
    assert set(last.pages) <= set(brief.pages)
    assert last.output == backend.alone(last.prompt)
    assert going.output[:NUM_OUTPUT] == backend.alone(going.prompt)


def test_a_plan_may_only_end_sequences(backend: Backend):
    driver = Driver(backend.build())
    requests = [driver.begin(prompt) for prompt in PROMPTS[:3]]
    driver.run(requests, 2)
    runner = driver.runner.runner
    handles = [request.handle for request in requests]
    result = runner.execute(StepPlan(driver.step, (), ended=tuple(handles)))
    assert (result.step, result.rows) == (driver.step, ())
    assert result.elapsed_s >= 0


def test_a_dummy_step_is_seen_by_nobody(backend: Backend, driver: Driver):
    """It may come between any two steps, ends sequences as others do, and takes no less time than
    an empty one."""
    requests = [driver.begin(prompt) for prompt in PROMPTS]
    ended = driver.begin(PROMPTS[2])
    driver.run([*requests, ended], 2)
    driver.end(ended)
    for _ in range(NUM_OUTPUT):
        assert driver.dummy().rows == ()
        driver.advance([(request, request.remaining) for request in requests])
    for request in requests:
        assert request.output[:NUM_OUTPUT] == backend.alone(request.prompt)


def test_q05_a_row_that_is_not_finite_fails_alone(backend: Backend):
    """No token, not token 0, in this step and in those that go on from it."""
    bad_prompt = [*a_prompt(4, 30), POISON, *a_prompt(5, 30)]
    driver = Driver(backend.build(poisoned=True), blind=True)
    bad, *good = [driver.begin(prompt) for prompt in (bad_prompt, *PROMPTS[1:])]
    driver.run([good[0], bad, *good[1:]], NUM_OUTPUT, chunk=40)
    assert [(row.token, row.finite) for row in bad.results[1:]] == [(-1, False)] * NUM_OUTPUT
    assert all(row.logprobs is None and row.prompt_logprobs == () for row in bad.results)
    for request in good:
        assert all(row.finite for row in request.results)
        assert request.output[:NUM_OUTPUT] == backend.alone(request.prompt)


@pytest.mark.parametrize("length", [5, 40])
def test_q05_pages_of_a_poisoned_sequence_are_safe_to_reuse(backend: Backend, length: int):
    """Also where the next owner fills its last page in part only."""
    driver = Driver(backend.build(poisoned=True))
    bad = driver.begin([*a_prompt(4, 3), *[POISON] * 150])
    driver.advance([(bad, bad.remaining)])
    driver.end(bad)
    prompts = [a_prompt(30, length), a_prompt(31, 2 * length)]
    requests = [driver.begin(prompt) for prompt in prompts]
    driver.run(requests, NUM_OUTPUT, chunk=11)
    assert {page for request in requests for page in request.pages} <= set(bad.pages)
    for request in requests:
        assert request.output[:NUM_OUTPUT] == backend.alone(request.prompt)


# ---------------------------------------------------------------- the Runner itself


def test_capacity_is_sane_and_names_what_a_page_holds(backend: Backend):
    runner, twin = backend.build(), backend.build()
    found = runner.capacity
    assert isinstance(found, Capacity)
    assert (found.num_blocks, found.block_size) == (128, BLOCK)
    assert (found.vocab_size, found.max_model_len) == (VOCAB_SIZE, 512)
    assert found.eos_ids
    assert all(0 <= token < found.vocab_size for token in found.eos_ids)
    assert found.kv_format
    assert twin.capacity == found


def test_a_sequence_may_fill_the_longest_length_and_every_page(backend: Backend):
    runner = backend.build()
    longest, size = runner.capacity.max_model_len, runner.capacity.block_size
    per_request = longest // size
    driver = Driver(runner)
    requests = [
        driver.begin(a_prompt(40 + i, longest - 1))
        for i in range(runner.capacity.num_blocks // per_request)
    ]
    driver.run(requests, 2, chunk=256)
    pages = {page for request in requests for page in request.pages}
    assert pages == set(range(runner.capacity.num_blocks))
    for request in requests:
        assert [row.finite for row in request.results] == [True, True, True]
        assert all(0 <= token < VOCAB_SIZE for token in request.output)


def test_closing_twice_is_closing_once(backend: Backend):
    runner = backend.build()
    driver = Driver(runner)
    driver.run([driver.begin(PROMPTS[2], GREEDY)], 2)
    runner.close()
    runner.close()
    backend.build().close()

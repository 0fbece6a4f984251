"""The CPU Runner on smollm2-135m in float32 against what transformers continues (stored).

The smallest gap between the best two logits anywhere in the references is 0.003, a hundred times
the rounding noise, so tokens are compared exactly, whatever the way they were planned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from rtp.backends.model.runner import ModelRunner
from rtp.backends.torch_cpu import build
from rtp.core.steps import Known, Row, SequenceStart, StepPlan
from rtp.core.types import SamplingParams, pack_ids
from tests.backends.make_references import MODEL, NUM_OUTPUTS
from tests.support.checkpoints import smollm2_path
from tests.support.references import NEAR_TIE, Stored, stored
from tests.support.runners import Driver, Request


@pytest.fixture(autouse=True, scope="module")
def model_is_here() -> None:
    """Fetched at first use; skipped where it cannot be had."""
    smollm2_path()


@cache
def runner() -> ModelRunner:
    return build(checkpoint=MODEL, dtype="fp32", num_blocks=1024)


def alone(driver: Driver, references: list[Stored], num_outputs: int) -> list[Request]:
    requests = [driver.begin(reference.prompt) for reference in references]
    for request in requests:
        driver.run([request], num_outputs)
    return requests


def mixed(driver: Driver, references: list[Stored], num_outputs: int) -> list[Request]:
    """One more arrives in each step while the others decode."""
    requests: list[Request] = []
    for reference in references:
        requests.append(driver.begin(reference.prompt))
        driver.advance([(r, r.remaining) for r in requests if r.num_sampled < num_outputs])
    driver.run(requests, num_outputs)
    return requests


def chunked(driver: Driver, references: list[Stored], num_outputs: int) -> list[Request]:
    requests = [driver.begin(reference.prompt) for reference in references]
    driver.run(requests, num_outputs, chunk=7)
    return requests


def shared(driver: Driver, references: list[Stored], num_outputs: int) -> list[Request]:
    """Each prompt is answered twice; the second time, all its whole pages are there already."""
    first = [driver.begin(reference.prompt) for reference in references]
    driver.advance([(request, request.remaining) for request in first])
    again = [driver.begin(request.prompt, shares=request) for request in first]
    assert any(request.computed > 0 for request in again)
    driver.run(again, num_outputs)
    return again


MODES: dict[str, Callable[[Driver, list[Stored], int], list[Request]]] = {
    "alone": alone,
    "mixed": mixed,
    "chunked": chunked,
    "shared": shared,
}


def assert_equal(requests: list[Request], references: list[Stored], num_outputs: int) -> None:
    for request, reference in zip(requests, references, strict=True):
        assert request.output == reference.output[:num_outputs]


def test_references_have_no_near_ties():
    assert len(stored()) == 20
    for reference in stored():
        assert len(reference.output) == len(reference.gaps) == NUM_OUTPUTS
        assert min(reference.gaps) > NEAR_TIE


@pytest.mark.parametrize("mode", ["mixed", "shared"])
def test_first_tokens_are_those_of_transformers(mode: str):
    references = [stored()[i] for i in (0, 4, 17, 18)]
    requests = MODES[mode](Driver(runner(), blind=True), references, 16)
    assert_equal(requests, references, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "blind"),
    [("alone", False), *((mode, blind) for mode in list(MODES)[1:] for blind in (False, True))],
)
def test_every_token_is_that_of_transformers(mode: str, blind: bool):
    """blind: inputs are named by the step that samples them, as with two steps in flight."""
    requests = MODES[mode](Driver(runner(), blind=blind), stored(), NUM_OUTPUTS)
    assert_equal(requests, stored(), NUM_OUTPUTS)


def teacher_forced(runner: ModelRunner, ids: list[int]) -> list[float]:
    """Log-probability of each id but the first, given those before it."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    pages = pack_ids(range(-(-len(ids) // runner.capacity.block_size)))
    known = Known(pack_ids(ids))
    row = Row(0, 0, len(ids), known, pages, output_index=-1, prompt_logprobs=0)
    start = SequenceStart(0, 0, known.ids, b"", sampling, ())
    (result,) = runner.execute(StepPlan(0, (row,), (start,), (0,))).rows
    return [entry.logprob for entry in result.prompt_logprobs]


@pytest.mark.slow
def test_bf16_log_probabilities_are_near_those_of_float32():
    """Within 0.6 on every token of all references, 0.08 in the mean: bf16 keeps 8 bits, and 30
    layers round. 0.58 was seen between transformers in bf16 and llama.cpp in float32."""
    narrow = build(checkpoint=MODEL, dtype="bf16", num_blocks=32)
    gaps = []
    for reference in stored():
        ids = reference.prompt + reference.output
        pairs = zip(teacher_forced(narrow, ids), teacher_forced(runner(), ids), strict=True)
        gaps += [abs(a - b) for a, b in pairs]
    print(f"largest gap {max(gaps):.3f}, mean {sum(gaps) / len(gaps):.4f}, {len(gaps)} tokens")
    assert max(gaps) <= 0.6
    assert sum(gaps) / len(gaps) <= 0.08

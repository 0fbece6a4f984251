"""The CPU Runner on tiny models: one answer however a plan cuts, mixes, shares or overlaps work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rtp.backends.model.runner import ModelRunner
from rtp.backends.torch_cpu import build, load_model, make_runner
from rtp.backends.weights.formats import open_checkpoint
from rtp.core.errors import ConfigError
from rtp.core.steps import StepPlan
from rtp.core.types import SamplingParams
from tests.backends.test_models import a_prompt
from tests.support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from tests.support.runners import GREEDY, Driver, Request

NUM_OUTPUT = 10
POISON = 3
"""The id whose embedding is not a number, in `a_poisoned_runner`."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windowed in the upper layer, so that every path of the attention takes part."""
    return tiny_checkpoint(
        tmp_path_factory.mktemp("model"),
        "qwen2",
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
    )


@pytest.fixture
def runner(checkpoint: Path) -> ModelRunner:
    return build(checkpoint=checkpoint, dtype="fp32", num_blocks=128)


def clean_prompt(seed: int, length: int) -> list[int]:
    return [token for token in a_prompt(seed, length) if token != POISON]


PROMPTS = [a_prompt(seed, length) for seed, length in enumerate((1, 5, 16, 17, 40, 100, 150))]
SHARED = [a_prompt(9, 70) + tail for tail in (a_prompt(10, 3), a_prompt(11, 30), [], [5])]


def alone(runner: ModelRunner, prompt: list[int]) -> list[int]:
    driver = Driver(runner)
    request = driver.begin(prompt)
    driver.run([request], NUM_OUTPUT)
    driver.end(request)
    return request.output


def in_one_batch(driver: Driver) -> list[Request]:
    requests = [driver.begin(prompt) for prompt in PROMPTS]
    driver.run(requests, NUM_OUTPUT)
    return requests


def in_chunks(driver: Driver) -> list[Request]:
    requests = [driver.begin(prompt) for prompt in PROMPTS]
    driver.run(requests, NUM_OUTPUT, chunk=7)
    return requests


def arriving_one_by_one(driver: Driver) -> list[Request]:
    """Prefills and decodes share steps."""
    requests: list[Request] = []
    for prompt in PROMPTS:
        requests.append(driver.begin(prompt))
        driver.advance([(request, request.remaining) for request in requests])
    driver.run(requests, NUM_OUTPUT)
    return requests


def over_shared_pages(driver: Driver) -> list[Request]:
    """Each later one starts from the pages of the first, which goes on decoding."""
    first = driver.begin(SHARED[0])
    driver.advance([(first, first.remaining)])
    others = [driver.begin(prompt, shares=first) for prompt in SHARED[1:]]
    assert [request.computed for request in others] == [64, 64, 64]
    driver.run([first, *others], NUM_OUTPUT)
    return [first, *others]


@pytest.mark.parametrize("blind", [False, True], ids=["known", "two-in-flight"])
@pytest.mark.parametrize("play", [in_one_batch, in_chunks, arriving_one_by_one, over_shared_pages])
def test_output_does_not_depend_on_how_work_is_planned(
    runner: ModelRunner, play: Callable[[Driver], list[Request]], blind: bool
):
    for request in play(Driver(runner, blind=blind)):
        assert request.output[:NUM_OUTPUT] == alone(runner, request.prompt)


def test_a_resumed_sequence_continues_as_if_never_stopped(runner: ModelRunner):
    prompt = PROMPTS[4]
    whole = alone(runner, prompt)
    driver = Driver(runner)
    request = driver.begin(prompt, output=whole[:4])
    driver.run([request], NUM_OUTPUT)
    assert request.output == whole


def test_tokens_of_the_step_before_last_can_be_named(runner: ModelRunner):
    """A row may skip a step: its input is then two steps old."""
    driver = Driver(runner, blind=True)
    first, second = driver.begin(PROMPTS[2]), driver.begin(PROMPTS[3])
    driver.advance([(first, first.remaining), (second, second.remaining)])
    driver.advance([(first, 1)])
    driver.advance([(first, 1)])
    driver.advance([(second, 1)])
    driver.run([first, second], NUM_OUTPUT)
    assert first.output == alone(runner, first.prompt)
    assert second.output[:NUM_OUTPUT] == alone(runner, second.prompt)


def test_batched_decodes_of_unlike_length_agree_with_each_alone(checkpoint: Path):
    """From 1 to 30 pages: grouped by length, each group padded."""
    runner = build(checkpoint=checkpoint, dtype="fp32", num_blocks=400)
    prompts = [a_prompt(20 + i, length) for i, length in enumerate((3, 20, 470, 450, 9, 300))]
    prompts += [a_prompt(30 + i, 4) for i in range(8)]
    driver = Driver(runner)
    requests = [driver.begin(prompt) for prompt in prompts]
    driver.run(requests, NUM_OUTPUT)
    for request in requests:
        assert request.output == alone(runner, request.prompt)


@pytest.mark.parametrize("chunk", [33, 1])
def test_bf16_batches_and_chunks_stay_close_to_alone(checkpoint: Path, chunk: int):
    """Chunks of one token take the decode path through the whole prompt. Rounding may differ with
    the shape of a product: a few bf16 steps of logits up to 6 are allowed."""
    runner = build(checkpoint=checkpoint, dtype="bf16", num_blocks=128)
    scored = SamplingParams(max_tokens=9, temperature=0.0, logprobs=0)
    driver = Driver(runner)
    together = [driver.begin(prompt, scored) for prompt in PROMPTS]
    driver.run(together, 1, chunk=chunk)
    for request in together:
        single = driver.begin(request.prompt, scored)
        driver.run([single], 1)
        driver.end(single)
        one, other = single.results[-1].logprobs, request.results[-1].logprobs
        assert one is not None
        assert other is not None
        assert abs(one.logprob - other.logprob) < 0.1


# --- non-finite numbers -------------------------------------------------------------------------


def a_poisoned_runner(
    checkpoint: Path, value: float, name: str = "model.embed_tokens.weight"
) -> ModelRunner:
    source = open_checkpoint(checkpoint)
    tensors = dict(source.tensors())
    tensors[name] = tensors[name].clone()
    tensors[name][POISON] = value
    model = load_model(source.config, tensors.items(), "fp32")
    return make_runner(model, source.revision, num_blocks=128)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_q05_a_poisoned_row_fails_alone(checkpoint: Path, value: float):
    """It gives no token, not token 0; its neighbours in the same steps do not notice."""
    runner = a_poisoned_runner(checkpoint, value)
    good = [clean_prompt(seed, length) for seed, length in ((1, 20), (2, 90), (3, 5))]
    bad = [*clean_prompt(4, 30), POISON, *clean_prompt(5, 30)]
    expected = [alone(runner, prompt) for prompt in good]
    driver = Driver(runner, blind=True)
    requests = [driver.begin(prompt) for prompt in [good[0], bad, *good[1:]]]
    driver.run(requests, NUM_OUTPUT, chunk=40)
    poisoned = requests.pop(1)
    assert [request.output for request in requests] == expected
    assert {row.finite for request in requests for row in request.results} == {True}
    assert {row.token for row in poisoned.results} == {-1}
    assert {row.finite for row in poisoned.results} == {False}


@pytest.mark.parametrize("length", [5, 21, 40])
def test_q05_pages_of_a_poisoned_sequence_are_safe_to_reuse(checkpoint: Path, length: int):
    """Also where the next owner fills a page in part only, and neighbours are padded."""
    runner = a_poisoned_runner(checkpoint, float("nan"))
    prompts = [clean_prompt(6, length), clean_prompt(7, 3 * length)]
    expected = [alone(runner, prompt) for prompt in prompts]
    driver = Driver(runner)
    bad = driver.begin([*clean_prompt(4, 3), *[POISON] * 155])
    driver.advance([(bad, bad.remaining)])
    driver.end(bad)
    requests = [driver.begin(prompt) for prompt in prompts]
    driver.run(requests, NUM_OUTPUT, chunk=11)
    assert {request.pages[0] for request in requests} <= set(bad.pages)
    assert [request.output for request in requests] == expected


def test_q05_non_finite_logits_fail_the_row_that_samples(checkpoint: Path):
    runner = a_poisoned_runner(checkpoint, float("nan"), "lm_head.weight")
    driver = Driver(runner)
    request = driver.begin(PROMPTS[4])
    driver.advance([(request, 39)])
    driver.advance([(request, 1)])
    assert [(row.token, row.finite) for row in request.results] == [(-1, True), (-1, False)]


# --- log-probabilities --------------------------------------------------------------------------


def test_l02_chosen_token_is_bit_equal_among_the_alternatives(runner: ModelRunner):
    """Whatever was sampled: values are of the raw distribution, before temperature and top-k."""
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=1.5, top_k=3, seed=3, logprobs=5)
    driver = Driver(runner)
    request = driver.begin(PROMPTS[4], sampling)
    plain = driver.begin(PROMPTS[4])
    driver.run([request, plain], NUM_OUTPUT)
    for row in request.results:
        entry = row.logprobs
        assert entry is not None
        assert (entry.token, len(entry.top_ids)) == (row.token, 5)
        assert entry.logprob == dict(zip(entry.top_ids, entry.top_logprobs, strict=True))[row.token]
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
    assert all(row.logprobs is None for row in plain.results)


def test_l03_log_probabilities_are_finite_whatever_sampling_excludes(runner: ModelRunner):
    sampling = SamplingParams(
        max_tokens=9, temperature=1.0, top_k=1, logprobs=VOCAB_SIZE, min_tokens=5
    )
    driver = Driver(runner)
    request = driver.begin(PROMPTS[4], sampling, stop_ids=(1, 2))
    driver.run([request], 3)
    entry = request.results[-1].logprobs
    assert entry is not None
    assert min(entry.top_logprobs) > -200


@pytest.mark.parametrize("chunk", [1 << 30, 33])
def test_l01_prompt_scores_are_those_of_the_whole_prompt(runner: ModelRunner, chunk: int):
    """One entry for every prompt token but the first, in whatever chunks; none for outputs."""
    driver = Driver(runner)
    prompt = PROMPTS[6]
    request = driver.begin(prompt)
    while request.num_sampled < 2:
        driver.advance([(request, min(chunk, request.remaining))], prompt_logprobs=2)
    scores = [entry for row in request.results for entry in row.prompt_logprobs]
    assert [entry.token for entry in scores] == prompt[1:]
    for at in (1, 64, 149):
        scored = SamplingParams(max_tokens=9, temperature=0.0, logprobs=VOCAB_SIZE)
        single = driver.begin(prompt[:at], scored)
        driver.run([single], 1)
        entry = single.results[0].logprobs
        assert entry is not None
        line = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
        assert scores[at - 1].logprob == pytest.approx(line[prompt[at]], abs=1e-4)
        assert scores[at - 1].top_ids == entry.top_ids[:2]


# --- building -----------------------------------------------------------------------------------


def test_capacity_names_the_bytes_of_a_page(checkpoint: Path):
    one = build(checkpoint=checkpoint, dtype="fp32", kv_bytes=1 << 20, block_size=32)
    page_bytes = 2 * 2 * 2 * 32 * 16 * 4
    assert one.capacity.num_blocks == (1 << 20) // page_bytes
    assert (one.capacity.block_size, one.capacity.vocab_size) == (32, VOCAB_SIZE)
    assert (one.capacity.max_model_len, one.capacity.eos_ids) == (512, (1,))
    same = build(checkpoint=checkpoint, dtype="fp32", num_blocks=3, block_size=32, max_model_len=99)
    assert same.capacity.kv_format == one.capacity.kv_format
    assert same.capacity.max_model_len == 99
    other = build(checkpoint=checkpoint, dtype="bf16", num_blocks=3, block_size=32)
    assert other.capacity.kv_format != one.capacity.kv_format


@pytest.mark.parametrize("params", [{"dtype": "fp16"}, {"kv_bytes": 100}, {"num_blocks": 0}])
def test_settings_that_cannot_work_are_refused(checkpoint: Path, params: dict[str, object]):
    with pytest.raises(ConfigError, match=next(iter(params))):
        build(checkpoint=checkpoint, **params)


def test_pages_copied_out_and_in_are_the_same_pages(checkpoint: Path):
    """What a transport or a lower tier does: another Runner goes on from the copied pages."""
    source = open_checkpoint(checkpoint)
    model = load_model(source.config, source.tensors(), "fp32")
    first = make_runner(model, source.revision, num_blocks=32)
    second = make_runner(model, source.revision, num_blocks=16)
    driver = Driver(first)
    request = driver.begin(PROMPTS[4])
    driver.advance([(request, request.remaining)])
    other = Driver(second, seed=5)
    moved = other.begin(PROMPTS[4], output=request.output)
    moved.computed = request.computed
    moved.pages = [14, 3, 8]
    other._free = [0, 1]
    data = first.pool.export_pages(torch.tensor(request.pages))
    second.pool.import_pages(torch.tensor(moved.pages), data)
    other.run([moved], NUM_OUTPUT)
    driver.run([request], NUM_OUTPUT)
    assert moved.output == request.output


def test_a_plan_may_only_end_sequences(runner: ModelRunner):
    driver = Driver(runner)
    request = driver.begin(PROMPTS[1], GREEDY)
    driver.run([request], 2)
    result = runner.execute(StepPlan(driver.step, (), (), (request.handle,)))
    assert result.rows == ()

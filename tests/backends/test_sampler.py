"""The sampler against naive restatements and its own promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rtp.backends.model.draws import uniforms
from rtp.backends.model.sampler import adjust, sample, truncated
from rtp.backends.model.sequences import Sequence
from rtp.core.steps import SequenceStart
from rtp.core.types import SamplingParams, pack_ids

VOCAB = 50


def a_sequence(
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    choice: int = 0,
    stop_ids: tuple[int, ...] = (),
    **sampling: Any,
) -> Sequence:
    params = SamplingParams(max_tokens=100, **sampling)
    return Sequence(SequenceStart(1, choice, pack_ids(prompt), pack_ids(output), params, stop_ids))


def some_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.zeros(3, VOCAB)
    logits[0, [4, 9]] = 2.0
    logits[1, 49] = 1.0
    greedy = a_sequence(temperature=0.0)
    biased = a_sequence(temperature=0.0, logit_bias={30: 1.0, 20: 1.0})
    assert sample(logits, [greedy, greedy, biased], [0, 0, 0]).tolist() == [4, 49, 20]


def test_logits_are_left_as_they_are():
    logits = some_logits(2)
    before = logits.clone()
    warm = a_sequence((1, 2), (3,), presence_penalty=1.0, logit_bias={4: 2.0}, top_k=3)
    sample(logits, [warm, a_sequence(temperature=0.0)], [1, 0])
    assert torch.equal(logits, before)


def test_d03_a_draw_is_the_same_alone_and_in_any_batch():
    """Temperature 2, every option in the company: the row's token stays."""
    logits = some_logits(40)
    rows = [
        a_sequence((1, 2, 3), (5, 5), temperature=2.0, seed=7, choice=c, top_p=0.9, min_p=0.01)
        for c in range(8)
    ]
    company = [
        a_sequence(temperature=t, seed=s, top_k=k, frequency_penalty=0.5)
        for s, (t, k) in enumerate(zip([0.0, 0.5, 1.0, 2.0] * 8, [0, 5, 50, 1] * 8, strict=True))
    ]
    alone = [int(sample(logits[[i]], [row], [i])[0]) for i, row in enumerate(rows)]
    together = sample(logits, rows + company, list(range(40)))
    assert together[:8].tolist() == alone
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [(rows + company)[i] for i in order], order)
    assert shuffled.tolist() == together[order].tolist()


def test_draws_differ_by_seed_choice_and_index():
    base = uniforms([1], [0], [0])[0]
    others = [uniforms([2], [0], [0]), uniforms([1], [1], [0]), uniforms([1], [0], [1])]
    assert len({base, *(other[0] for other in others)}) == 4
    assert uniforms(
        [1, 1, -1, (1 << 64) - 1], [0, 0, 3, 3], [0, 0, 4, 4]
    ).tolist() == pytest.approx([base, base, *[uniforms([-1], [3], [4])[0]] * 2], abs=0)


def test_draws_are_even_over_indices_and_seeds():
    """Chi-square over 100 bins, 99 degrees of freedom: 149 is passed once in a thousand; the
    counters are fixed, so the outcome is too. Neighbouring counters must not correlate either."""
    for draws in (
        uniforms([42] * 10_000, [0] * 10_000, list(range(10_000))),
        uniforms(list(range(10_000)), [0] * 10_000, [0] * 10_000),
    ):
        counts = np.histogram(draws, bins=100, range=(0, 1))[0]
        assert ((counts - 100) ** 2 / 100).sum() < 149
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.035


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)
def test_d04_tokens_follow_the_truncated_distribution(options: dict[str, Any]):
    """10 000 counters: nothing outside the kept set, and a chi-square within its 99.9 % bound."""
    logits = some_logits(1, seed=3)
    expected = naive_distribution(logits[0].double().numpy(), temperature=1.3, **options)
    kept = np.flatnonzero(expected)
    sequence = a_sequence(temperature=1.3, seed=11, **options)
    counts = np.zeros(VOCAB)
    for first in range(0, 10_000, 500):
        tokens = sample(logits.expand(500, -1), [sequence] * 500, list(range(first, first + 500)))
        np.add.at(counts, tokens, 1)
    assert set(np.flatnonzero(counts)) <= set(kept)
    wanted = 10_000 * expected[kept]
    chi_square = ((counts[kept] - wanted) ** 2 / wanted).sum()
    freedom = len(kept) - 1
    assert chi_square < freedom + 3.3 * (2 * freedom) ** 0.5 + 4


def naive_distribution(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Temperature, then top-k, then top-p, then min-p, as one reads them; values are distinct."""
    probs = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-probs)
    if top_k:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    if top_p < 1:
        held = 0.0
        for rank, token in enumerate(order):
            if held >= top_p:
                probs[order[rank:]] = 0
                break
            held += probs[token]
    probs[probs < min_p * probs.max()] = 0
    return np.asarray(probs / probs.sum())


@given(
    seed=st.integers(0, 1 << 20),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_d04_kept_sets_equal_the_naive_ones(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
):
    logits = some_logits(1, seed=seed)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = naive_distribution(logits[0].double().numpy(), **options)
    weights = truncated(logits, [a_sequence(**options)])[0].double().numpy()
    np.testing.assert_allclose(weights / weights.sum(), expected, atol=2e-6)


def test_equal_logits_are_kept_together():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    for options in ({"top_k": 2}, {"top_p": 0.5}):
        weights = truncated(logits.clone(), [a_sequence(**options)])[0]
        assert (weights > 0).tolist() == [True, True, True, False, True]


def test_extreme_temperatures_and_logits_stay_in_the_vocabulary():
    logits = torch.full((3, VOCAB), -1e30)
    logits[:, 17] = 1e30
    rows = [a_sequence(temperature=t, seed=5, top_p=0.5, top_k=2) for t in (1e-12, 1.0, 2.0)]
    assert sample(logits, rows, [0, 1, 2]).tolist() == [17, 17, 17]


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=40),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=90),
    resumed=st.integers(0, 90),
    repetition=st.sampled_from([1.0, 0.5, 1.7]),
    presence=st.sampled_from([0.0, -1.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.25]),
)
@settings(max_examples=150, deadline=None)
def test_penalties_equal_a_naive_count(
    prompt: list[int],
    output: list[int],
    resumed: int,
    repetition: float,
    presence: float,
    frequency: float,
):
    """Part of the output was known at the start, the rest was sampled here."""
    sequence = a_sequence(
        tuple(prompt),
        tuple(output[:resumed]),
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    for token in output[resumed:]:
        sequence.push(token)
    logits = some_logits(1)
    expected = logits[0].tolist()
    for token in range(VOCAB):
        if token in prompt or token in output:
            value = expected[token]
            expected[token] = value / repetition if value > 0 else value * repetition
        expected[token] -= frequency * output.count(token) + presence * (token in output)
    adjust(logits, [(sequence, len(output))])
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_bias_and_minimum_length():
    logits = some_logits(2)
    before = logits.clone()
    sequence = a_sequence(min_tokens=3, stop_ids=(1, 2), logit_bias={5: -100.0, 6: 4.0})
    adjust(logits, [(sequence, 2), (sequence, 3)])
    assert logits[0, [1, 2]].tolist() == [-torch.inf] * 2
    assert torch.equal(logits[1, [1, 2]], before[1, [1, 2]])
    for row in (0, 1):
        assert logits[row, 5] == before[row, 5] - 100
        assert logits[row, 6] == before[row, 6] + 4
    greedy = a_sequence(temperature=0.0, min_tokens=3, stop_ids=(17,))
    before[:, 17] = 50.0
    early, late = sample(before, [greedy, greedy], [2, 3]).tolist()
    assert early != 17
    assert late == 17

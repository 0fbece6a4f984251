"""The simulated Runner: its output tells every wrong page, its seconds follow the formula."""

from __future__ import annotations

import numpy as np
import pytest

from rtp.backends import sim
from rtp.core.errors import ShapeError
from rtp.core.plugins import build
from rtp.core.steps import FromStep, Known, Row, SequenceStart, StepPlan
from rtp.core.types import SamplingParams, pack_ids

PROMPT = list(range(100, 110))


def start(handle: int = 0, prompt: list[int] = PROMPT, **sampling: object) -> SequenceStart:
    params = SamplingParams(max_tokens=8, **({"temperature": 0.0} | sampling))
    return SequenceStart(handle, 0, pack_ids(prompt), b"", params, (2,))


def row(begin: int, ids: list[int] | FromStep, pages: list[int], index: int = -1, **more) -> Row:
    known = not isinstance(ids, FromStep)
    return Row(
        sequence=more.pop("sequence", 0),
        start=begin,
        num_new=len(ids) if known else 1,
        inputs=Known(pack_ids(ids)) if known else ids,
        pages=pack_ids(pages),
        output_index=index,
        **more,
    )


def small(**params: object):
    return sim.build(**({"num_blocks": 8, "block_size": 4, "vocab_size": 1000} | params))


def test_chunks_and_steps_in_flight_give_the_expected_tokens():
    runner = small()
    runner.execute(StepPlan(0, (row(0, PROMPT[:7], [5, 1]),), started=(start(),)))
    first = runner.execute(StepPlan(1, (row(7, PROMPT[7:], [5, 1, 3], 0),)))
    second = runner.execute(StepPlan(2, (row(10, FromStep(1, 0), [5, 1, 3], 1),)))
    tokens = [first.rows[0].token, second.rows[0].token]
    params = SamplingParams(max_tokens=2, temperature=0.0)
    assert tokens == sim.expected_tokens(runner._rule, PROMPT, params)


@pytest.mark.parametrize("pages", [[1, 5, 3], [5, 1, 2], [5, 0, 3]])
def test_a_wrong_or_unwritten_page_changes_the_output(pages):
    runner = small()
    other = StepPlan(0, (row(0, list(range(12)), [0, 2, 4]),), started=(start(),))
    runner.execute(other)
    good = runner.execute(StepPlan(1, (row(0, PROMPT, [5, 1, 3], 0, sequence=1),), (start(1),)))
    params = SamplingParams(max_tokens=2, temperature=0.0)
    want = sim.expected_tokens(runner._rule, PROMPT, params)
    assert good.rows[0].token == want[0]
    (bad,) = runner.execute(StepPlan(2, (row(10, want[:1], pages, 1, sequence=1),))).rows
    assert bad.token != want[1]


def test_f01_the_same_tokens_behind_another_prefix_are_not_the_same_page():
    runner = small()
    other = [*range(200, 204), *PROMPT[4:8]]
    runner.execute(StepPlan(0, (row(0, other, [0, 1]),), started=(start(),)))
    runner.execute(StepPlan(1, (row(0, PROMPT[:8], [2, 3], sequence=1),), (start(1),)))
    params = SamplingParams(max_tokens=1, temperature=0.0)
    want = sim.expected_tokens(runner._rule, PROMPT, params)
    plans = [
        StepPlan(2 + i, (row(8, PROMPT[8:], [2, page, 4], 0, sequence=1),))
        for i, page in enumerate((3, 1))
    ]
    right, wrong = (runner.execute(plan).rows[0].token for plan in plans)
    assert right == want[0]
    assert wrong != want[0]


def test_rows_of_one_step_do_not_see_each_others_pages():
    runner = small()
    rows = (row(0, PROMPT[:4], [0]), row(4, PROMPT[4:], [0, 1, 2], 0, sequence=1))
    _, reader = runner.execute(StepPlan(0, rows, started=(start(), start(1)))).rows
    assert not reader.finite


def test_sampling_counts_by_seed_choice_and_index():
    rule = sim.Rule(1000, (2,))
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    hot = SamplingParams(max_tokens=1, temperature=1.0, seed=1)
    other = SamplingParams(max_tokens=1, temperature=1.0, seed=2)
    draws = [
        rule.next_token(b"context", params, choice, index)
        for params in (greedy, hot, other)
        for choice in range(3)
        for index in range(3)
    ]
    assert len(set(draws[:9])) == 1
    assert len(set(draws[9:])) == 18


def test_eos_comes_as_often_as_asked_and_not_before_min_tokens():
    rule = sim.Rule(1000, (2,), eos_every=10)
    params = SamplingParams(max_tokens=100, min_tokens=5)
    contexts = [str(number).encode() for number in range(2000)]
    assert {sim.Rule(4, (2,)).next_token(c, params, 0, 7) for c in contexts} == {0, 1, 3}
    tokens = [rule.next_token(context, params, 0, 7, (2,)) for context in contexts]
    assert 150 < tokens.count(2) < 250
    assert all(rule.next_token(context, params, 0, 4, (2,)) != 2 for context in contexts)


def test_logprobs_are_bit_equal_among_the_alternatives_and_best_first():
    runner = small(vocab_size=8)
    plan = StepPlan(
        0, (row(0, [1, 3, 4, 5, 6], [0, 1], 0, prompt_logprobs=8),),
        started=(start(prompt=[1, 3, 4, 5, 6], logprobs=8),),
    )  # fmt: skip
    (answer,) = runner.execute(plan).rows
    assert [lp.token for lp in answer.prompt_logprobs] == [3, 4, 5, 6]
    for lp in (answer.logprobs, *answer.prompt_logprobs):
        assert dict(zip(lp.top_ids, lp.top_logprobs, strict=True))[lp.token] == lp.logprob
        assert sorted(lp.top_logprobs, reverse=True) == list(lp.top_logprobs)
        assert np.float32(lp.logprob) == lp.logprob


def test_a_marked_token_makes_its_row_non_finite_and_so_does_what_follows_from_it():
    runner = small(nonfinite_token=7)
    rows = (row(0, [3, 7], [0], 0), row(0, PROMPT, [1, 2, 3], 0, sequence=1))
    bad, good = runner.execute(StepPlan(0, rows, started=(start(), start(1)))).rows
    assert (bad.finite, bad.token) == (False, -1)
    assert good.finite
    (after,) = runner.execute(StepPlan(1, (row(2, FromStep(0, 0), [0], 1),))).rows
    assert not after.finite


def test_seconds_follow_the_formula():
    cost = {"a": 1.0, "b": 10.0, "c": 100.0, "d": 1000.0, "e": 10000.0, "f": 100000.0}
    runner = small(num_blocks=16, **cost)
    chunk = row(4, [1] * 6, [0, 1, 2])
    decode = row(9, [1], [3, 4, 5], 1, sequence=1)
    prefill_s = 1 + 10 * 6 + 100 * 6 * (4 + 3)
    decode_s = 1000 + 10000 + 100000 * 10
    steps = [(chunk,), (decode,), (chunk, decode)]
    runner.execute(StepPlan(0, (), started=(start(), start(1))))
    got = [runner.execute(StepPlan(i + 1, rows)).elapsed_s for i, rows in enumerate(steps)]
    assert got == [prefill_s, decode_s, prefill_s + decode_s]


def test_a_dummy_step_takes_what_every_step_takes():
    for a, d in ((1.0, 2.0), (2.0, 1.0)):
        runner = small(a=a, b=0.0, c=0.0, d=d, e=0.0, f=0.0)
        assert runner.execute(StepPlan(0, (), dummy=True)).elapsed_s == 1.0
        assert runner.execute(StepPlan(1, ())).elapsed_s == 0.0


def test_a_malformed_row_is_named():
    runner = small()
    for bad in (row(0, PROMPT, [0]), row(8, FromStep(0, 0), [0, 1])):
        with pytest.raises(ShapeError):
            runner.execute(StepPlan(0, (bad,), started=(start(),)))


def test_it_is_a_plugin():
    assert build("backend", "sim", num_blocks=3).capacity.num_blocks == 3


def test_realtime_takes_as_long_as_it_says(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(sim.time, "sleep", slept.append)
    runner = small(realtime=True)
    result = runner.execute(StepPlan(0, (row(0, PROMPT, [0, 1, 2]),), started=(start(),)))
    assert slept == [result.elapsed_s]


@pytest.mark.parametrize("realtime", [False, True])
def test_where_only_time_counts_every_token_is_an_ordinary_one(realtime: bool):
    cost = {"a": 1e-6, "b": 0.0, "c": 1e-9}
    runner = sim.build(contents=False, realtime=realtime, vocab_size=100, eos_ids=(99,), **cost)
    ids = [5] * 30
    result = runner.execute(StepPlan(0, (row(0, ids, [], 0), row(0, ids, [], sequence=1))))
    assert [answer.token for answer in result.rows] == [98, -1]
    assert result.elapsed_s == pytest.approx(1e-6 + 2 * 1e-9 * 30 * 15)

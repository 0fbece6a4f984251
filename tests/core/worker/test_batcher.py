"""Batching, prefix reuse and preemption, seen through outputs that depend on every page read."""

from __future__ import annotations

import random

import pytest

from rtp.core.errors import ConfigError
from rtp.core.steps import FromStep
from rtp.core.types import Role, split_hashes
from rtp.core.worker.batcher import MAX_BYPASS
from tests.core.worker.rig import Rig

BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])


def rows(rig: Rig):
    return [row for plan in rig.runners[0].plans for row in plan.rows]


def computed(rig: Rig) -> int:
    return sum(row.num_new for row in rows(rig))


@BOTH
def test_long_prompts_are_computed_in_chunks_beside_decodes(steps_in_flight):
    rig = Rig(steps_in_flight=steps_in_flight, max_batch_tokens=32, chunk_while_decoding=8)
    first = rig.submit("a", range(10), 40)
    rig.run(until=lambda: len(rig.outputs["a", 0, 0]) > 3)
    second = rig.submit("b", range(100, 190), 4)
    rig.run()
    rig.assert_right(first, second)
    for plan in rig.runners[0].plans:
        decodes = [row for row in plan.rows if row.output_index > 0]
        chunks = sum(row.num_new for row in plan.rows if row not in decodes)
        assert chunks <= (8 if decodes else 32)
        assert sum(row.num_new for row in plan.rows) <= 32
    rig.assert_quiet()


def test_two_steps_in_flight_feed_samples_that_are_not_known_yet():
    rig = Rig(steps_in_flight=2)
    done = rig.submit("a", range(9), 12)
    rig.run()
    rig.assert_right(done)
    decodes = [row for row in rows(rig) if row.output_index > 0]
    assert all(isinstance(row.inputs, FromStep) for row in decodes)
    assert len(decodes) == 11, "never past max_tokens"


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_requests_gives_each_its_solo_output(steps_in_flight, seed):
    """Shared prefixes, small pool, EOS, sampling, n: outputs never depend on the company."""
    draw = random.Random(seed)
    rig = Rig(
        steps_in_flight=steps_in_flight,
        max_batch_tokens=draw.choice([16, 64]),
        chunk_while_decoding=8,
        max_rows=draw.choice([3, 16]),
        sim_params={"num_blocks": draw.choice([24, 60]), "eos_every": draw.choice([0, 20])},
    )
    submits = []
    for number in range(24):
        shared = draw.choice([0, 8, 21, 30])
        prompt = [*range(shared), *(draw.randrange(1000) for _ in range(draw.randint(1, 20)))]
        submits.append(
            rig.submit(
                f"r{number}",
                prompt,
                draw.randint(1, 30),
                n=draw.choice([1, 1, 3]),
                temperature=draw.choice([0.0, 1.0]),
                seed=number,
                logprobs=draw.choice([None, 2]),
                prompt_logprobs=draw.choice([None, None, 1]),
                min_tokens=draw.choice([0, 1]),
            )
        )
        rig.run(draw.random() * 0.2)
    rig.run()
    refused = {r.request_id for r in rig.rejected}
    assert all(r.reason == "preempted" for r in rig.rejected)
    assert len(refused) <= 2
    rig.assert_right(*(s for s in submits if s.request_id not in refused))
    rig.assert_quiet()


@BOTH
def test_k15_pool_for_two_runs_four_long(steps_in_flight):
    """All finish, each equal to its solo greedy output."""
    rig = Rig(steps_in_flight=steps_in_flight, sim_params={"num_blocks": 32, "block_size": 4})
    submits = [rig.submit(f"r{i}", range(100 * i, 100 * i + 8), 56) for i in range(4)]
    rig.run()
    rig.assert_right(*submits)
    assert rig.worker.stats.preemptions >= 2
    assert rig.worker.stats.computed_tokens < 3 * 4 * 64, "it crawls"
    rig.assert_quiet()


def test_the_oldest_sequence_is_never_preempted():
    """Not even where it would lose least."""
    rig = Rig(sim_params={"num_blocks": 32})
    old = rig.submit("old", range(4), 110)
    young = rig.submit("young", range(100, 170), 40)
    rig.run()
    rig.assert_right(old, young)
    started = [s.prompt for plan in rig.runners[0].plans for s in plan.started]
    assert started == [old.prompt, young.prompt, young.prompt]
    rig.assert_quiet()


def test_on_a_decode_role_what_is_preempted_goes_back():
    """The Master knows a rank with room; elsewhere it is computed anew here, three times at
    most."""
    rig = Rig(role=Role.DECODE, sim_params={"num_blocks": 32})
    old = rig.submit("old", range(4), 110)
    rig.submit("young", range(100, 150), 40, n=2)
    rig.run()
    rig.assert_right(old)
    assert [(r.request_id, r.reason, r.retry) for r in rig.rejected] == [
        ("young", "preempted", True)
    ]
    assert rig.master.ends["young", 0].reason == "rejected"
    rig.assert_quiet()


@BOTH
def test_f04_equal_cold_prompts_are_computed_once(steps_in_flight):
    """Two at the same moment: both right, shared blocks computed by one, awaited by the other."""
    rig = Rig(steps_in_flight=steps_in_flight, max_batch_tokens=16)
    submits = [rig.submit(name, range(41), 6) for name in "ab"]
    rig.run()
    rig.assert_right(*submits)
    prompts = [row for row in rows(rig) if row.output_index <= 0]
    assert sum(row.num_new for row in prompts) == 41 + 1
    assert rig.cached["b", 0, 0] == 40
    rig.assert_quiet()


@BOTH
def test_choices_of_one_request_share_its_prompt(steps_in_flight):
    rig = Rig(steps_in_flight=steps_in_flight)
    submit = rig.submit("a", range(33), 5, n=4, temperature=1.0)
    rig.run()
    rig.assert_right(submit)
    assert len({tuple(rig.outputs["a", 0, choice]) for choice in range(4)}) == 4
    prompts = [row for row in rows(rig) if row.output_index <= 0]
    assert sum(row.num_new for row in prompts) == 33 + 3
    rig.assert_quiet()


def test_a_waiting_sequence_takes_over_when_the_computing_one_is_cancelled():
    rig = Rig(max_batch_tokens=8)
    rig.submit("a", range(60), 4)
    second = rig.submit("b", range(60), 4)
    rig.run(until=lambda: len(rows(rig)) == 3)
    rig.cancel("a")
    rig.run()
    rig.assert_right(second)
    rig.assert_quiet()


def test_reuse_stops_before_the_last_token():
    """A full hit computes at least the last token, from a block boundary."""
    rig = Rig()
    rig.assert_finishes(rig.submit("a", range(40), 4))
    rig.assert_finishes(rig.submit("b", range(40), 4))
    rig.assert_finishes(rig.submit("c", range(41), 4))
    assert (rig.cached["b", 0, 0], rig.cached["c", 0, 0]) == (36, 40)


def test_f07_a_prefix_shorter_than_a_block_does_not_hit():
    rig = Rig(sim_params={"block_size": 16})
    rig.assert_finishes(rig.submit("a", [*range(15), 99], 2))
    rig.assert_finishes(rig.submit("b", [*range(15), 98, 97], 2))
    assert rig.cached["b", 0, 0] == 0
    assert rig.worker.stats.prefix_hit_tokens == 0
    assert rig.worker.stats.prefix_query_tokens == 16 + 17


def test_generated_tokens_are_found_by_the_next_turn():
    rig = Rig()
    first = rig.submit("a", range(10), 30)
    rig.assert_finishes(first)
    turn = [*range(10), *rig.outputs["a", 0, 0], 7, 7, 7]
    rig.assert_finishes(rig.submit("b", turn, 4))
    assert rig.cached["b", 0, 0] == 36, "39 tokens were computed: nine whole blocks"


def test_prompt_logprobs_compute_every_position_and_feed_the_cache():
    rig = Rig(max_batch_tokens=16)
    rig.assert_finishes(rig.submit("a", range(40), 2))
    rig.assert_finishes(rig.submit("b", range(40), 0, prompt_logprobs=2))
    assert rig.finishes["b", 0, 0] == "length"
    assert rig.outputs["b", 0, 0] == []
    assert [lp.token for lp in rig.prompt_logprobs["b", 0]] == list(range(1, 40))
    rig.assert_finishes(rig.submit("c", range(50, 90), 1, prompt_logprobs=1))
    rig.assert_finishes(rig.submit("d", range(50, 90), 1))
    assert rig.cached["d", 0, 0] == 36
    rig.assert_quiet()


def test_a07_a_prompt_larger_than_the_pool_is_refused_at_once():
    rig = Rig(sim_params={"num_blocks": 16, "max_model_len": 4096})
    rig.submit("big", range(200), 4)
    small = rig.submit("small", range(10), 4)
    assert [(r.request_id, r.reason, r.retry) for r in rig.rejected] == [("big", "too_long", False)]
    rig.assert_finishes(small)
    rig.assert_quiet()


def test_a07_a_prompt_that_just_fits_the_pool_may_yield_one_token():
    rig = Rig(sim_params={"num_blocks": 8})
    rig.assert_finishes(rig.submit("one", range(32), 1))
    rig.submit("two", range(32), 2)
    assert [(r.request_id, r.reason) for r in rig.rejected] == [("two", "too_long")]


def test_prompt_logprobs_are_complete_and_given_once_through_preemption():
    rig = Rig(sim_params={"num_blocks": 32}, chunk_while_decoding=2)
    old = rig.submit("old", range(4), 110)
    rig.run(0.1)
    long = rig.submit("long", range(100, 190), 2, prompt_logprobs=1)
    rig.run()
    rig.assert_right(old, long)
    assert rig.worker.stats.preemptions == 1
    assert [lp.token for lp in rig.prompt_logprobs["long", 0]] == list(range(101, 190))
    rig = Rig(sim_params={"num_blocks": 32})
    old = rig.submit("old", range(40), 80)
    young = rig.submit("young", range(100, 110), 60, prompt_logprobs=1)
    rig.run()
    rig.assert_right(old, young)
    assert rig.worker.stats.preemptions == 1
    assert sum(row.num_new for row in rows(rig) if row.prompt_logprobs >= 0) == 10


def test_a08_a_head_without_room_is_passed_by_small_ones_but_not_for_ever():
    rig = Rig()
    base = rig.submit("base", range(500, 540), 200)
    rig.run(0.1)
    large = rig.submit("large", range(220), 2)
    small = [rig.submit(f"s{i}", range(1000 + 10 * i, 1006 + 10 * i), 2) for i in range(200)]
    rig.run()
    rig.assert_right(base, large, *small)
    started = [s.prompt for plan in rig.runners[0].plans for s in plan.started]
    assert started.index(large.prompt) == 1 + MAX_BYPASS
    rig.assert_quiet()


def test_a_lone_sequence_that_outgrows_the_pool_ends_at_that_length():
    rig = Rig(sim_params={"num_blocks": 8})
    rig.submit("a", range(20), 100)
    rig.run()
    assert rig.finishes["a", 0, 0] == "length"
    assert len(rig.outputs["a", 0, 0]) == 13, "all that fits: 32 computed tokens and one sample"
    assert rig.master.ends["a", 0].reason == "done"
    rig.assert_quiet()


@BOTH
def test_q05_non_finite_numbers_fail_the_request_and_nothing_else(steps_in_flight):
    rig = Rig(
        steps_in_flight=steps_in_flight,
        max_batch_tokens=16,
        chunk_while_decoding=16,
        sim_params={"nonfinite_token": 31_999},
    )
    good = rig.submit("good", range(30), 20)
    bad = rig.submit("bad", [*range(60, 90), 31_999, *range(90, 120)], 20)
    again = rig.submit("again", [*range(60, 90), 5, 6], 20)
    rig.run()
    assert rig.finishes["bad", 0, 0] == "error"
    assert rig.outputs["bad", 0, 0] == []
    held = set(rig.worker._ranks[0].batcher.blocks.keys())
    assert not held & set(split_hashes(bad.hashes)[7:]), "a block that was not finite is shared"
    rig.assert_right(good, again)
    assert rig.master.ends["bad", 0].reason == "failed"
    rig.assert_quiet()


def test_v11_output_ends_at_the_context_limit():
    rig = Rig(sim_params={"max_model_len": 64})
    submit = rig.submit("a", range(10), 54)
    rig.submit("b", range(10), 55)
    rig.assert_finishes(submit)
    assert rig.finishes["a", 0, 0] == "length"
    assert [r.request_id for r in rig.rejected] == ["b"]


@BOTH
def test_eos_and_stop_ids_end_a_choice_unless_ignored_or_too_early(steps_in_flight):
    rig = Rig(steps_in_flight=steps_in_flight, sim_params={"eos_every": 6})
    plain = rig.submit("a", range(10), 60)
    patient = rig.submit("b", range(10), 60, min_tokens=25)
    deaf = rig.submit("c", range(10), 60, ignore_eos=True)
    rig.run()
    rig.assert_right(plain, patient, deaf)
    assert rig.finishes["a", 0, 0] == "stop"
    assert rig.stop_tokens["a", 0, 0] == rig.outputs["a", 0, 0][-1] == 2
    assert len(rig.outputs["b", 0, 0]) > 25
    assert 2 not in rig.outputs["b", 0, 0][:25]
    assert len(rig.outputs["c", 0, 0]) == 60
    stop = rig.outputs["c", 0, 0][30]
    custom = rig.submit("d", range(10), 60, ignore_eos=True, stop_token_ids=(stop,))
    rig.assert_finishes(custom)
    assert rig.stop_tokens["d", 0, 0] == stop
    rig.assert_quiet()


def test_resumed_output_counts_and_continues_the_same_stream():
    rig = Rig()
    whole = rig.submit("a", range(10), 30, temperature=1.0, seed=5, n=2)
    rig.assert_finishes(whole)
    done = {0: rig.outputs["a", 0, 0][:11], 1: rig.outputs["a", 0, 1][:30]}
    again = rig.submit("a", range(10), 30, attempt=1, temperature=1.0, seed=5, n=2, outputs=done)
    rig.assert_finishes(again)
    assert rig.outputs["a", 1, 0] == rig.outputs["a", 0, 0]
    assert rig.frames[-1].runs, "the choice that was complete is told to be so"
    rig.assert_quiet()


def test_all_rows_share_one_step_up_to_the_limit():
    rig = Rig(max_rows=3, max_batch_tokens=64)
    submits = [rig.submit(f"r{i}", range(100 * i, 100 * i + 5), 10) for i in range(8)]
    rig.run()
    rig.assert_right(*submits)
    assert max(len(plan.rows) for plan in rig.runners[0].plans) == 3
    assert rig.worker.overview()["frontends"] == 1


@pytest.mark.parametrize(
    "limits",
    [{"max_batch_tokens": 1}, {"chunk_while_decoding": 0}, {"max_rows": 0}, {"steps_in_flight": 0}],
)
def test_limits_under_which_nothing_would_advance_are_refused(limits):
    with pytest.raises(ConfigError, match="at least"):
        Rig(**limits)


def test_a_prompt_advances_even_where_decodes_could_take_the_whole_step():
    rig = Rig(max_batch_tokens=4, chunk_while_decoding=4, max_rows=64)
    submits = [rig.submit(f"r{i}", range(50 * i, 50 * i + 5), 30) for i in range(6)]
    rig.run()
    rig.assert_right(*submits)
    plans = rig.runners[0].plans
    assert max(sum(row.num_new for row in plan.rows) for plan in plans) == 4
    assert max(sum(row.output_index > 0 for row in plan.rows) for plan in plans) == 3

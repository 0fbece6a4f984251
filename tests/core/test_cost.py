"""What steps cost, and profiles from data sheets."""

from __future__ import annotations

import pytest

from rtp.core.cost import Cost, Machine, Shape, roofline
from rtp.core.steps import Known, Row

COST = Cost(a=1.0, b=0.1, c=0.01, d=2.0, e=0.2, f=0.02)


def a_row(start: int, num_new: int) -> Row:
    return Row(
        sequence=1, start=start, num_new=num_new, inputs=Known(b""), pages=b"", output_index=0
    )


def test_a_prompt_alone_is_what_the_formula_says():
    assert COST.prefill_s(10, 20) == pytest.approx(1.0 + 0.1 * 10 + 0.01 * 10 * (20 + 5))
    assert COST.step_s([a_row(20, 10)]) == pytest.approx(COST.prefill_s(10, 20))


def test_decode_rows_cost_by_number_and_context():
    rows = [a_row(9, 1), a_row(19, 1)]
    assert COST.step_s(rows) == pytest.approx(COST.decode_s(2, 30))


def test_a_mixed_step_is_the_sum_of_both():
    assert COST.step_s([a_row(0, 10), a_row(9, 1)]) == pytest.approx(
        COST.prefill_s(10) + COST.decode_s(1, 10)
    )


def test_a_dummy_step_costs_the_lesser_overhead():
    assert COST.empty_s == 1.0


def test_roofline_of_llama_2_70b_on_eight_a100_is_what_is_used_with_the_mooncake_traces():
    """7 ms + 111 us a new token + 2.1e-9 s a pair: arithmetic at half the data sheet."""
    shape = Shape(
        parameters=70e9, active_parameters=70e9, layers=80, width=64 * 128, kv_width=8 * 128
    )
    machine = Machine(
        count=8,
        flops=312e12,
        memory_bytes=80e9,
        memory_bytes_per_s=2.039e12,
        network_bytes_per_s=200e9,
    )
    profile = roofline("llama2", shape, machine, "data sheets")
    assert profile.a == 0.007
    assert profile.b == pytest.approx(111e-6, rel=0.02)
    assert profile.c == pytest.approx(2.1e-9, rel=0.01)
    assert profile.kv_tokens * 2 * 80 * 1024 * 2 < 8 * 80e9 - 140e9

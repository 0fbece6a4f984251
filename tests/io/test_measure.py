"""The profile measured at start: what the simulated Runner's formula says comes out again."""

from __future__ import annotations

import pytest

from rtp.core import plugins
from rtp.io.measure import fit, measure

COST = {"a": 0.004, "b": 1e-3, "c": 2.5e-7, "d": 0.015, "e": 8e-4, "f": 8e-7}


def test_the_coefficients_of_the_simulation_are_found():
    runner = plugins.build("backend", "sim", **COST)
    lines: list[str] = []
    found = measure(runner, 512, lines.append)
    # A decode row attends to itself too: its context is one longer than measured, hence d.
    assert found == pytest.approx(tuple(COST.values()), rel=0.02)
    assert lines
    assert runner.num_sequences == 0


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 40])
@pytest.mark.parametrize("budget", [1, 16, 4096])
def test_any_size_of_pool_and_budget_can_be_measured(num_blocks: int, budget: int):
    runner = plugins.build("backend", "sim", num_blocks=num_blocks, max_model_len=200, **COST)
    found = measure(runner, budget, lambda line: None)
    assert all(value >= 0 for value in found)


def test_no_coefficient_is_negative():
    rows = [(1.0, (1.0, 1.0, 0.0)), (1.5, (1.0, 2.0, 9.0)), (2.6, (1.0, 3.0, 1.0))]
    assert min(fit(rows)) >= 0
    assert fit([(2.0, (1.0, 4.0, 0.0)), (4.0, (1.0, 8.0, 0.0))]) == pytest.approx([0, 0.5, 0])

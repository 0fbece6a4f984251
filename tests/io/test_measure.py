"""The profile measured at start: what the simulated Runner's formula says comes out again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rtp.core import plugins
from rtp.core.ports import Runner
from rtp.core.steps import StepPlan, StepResult
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


class Busy:
    """A Runner on a machine that is busy now and then: two of three steps take far longer."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self.capacity = inner.capacity
        self.spent_s = 0.0
        self._num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._inner.execute(plan)
        if plan.rows:
            self._num_steps += 1
            if self._num_steps % 3:
                result = replace(result, elapsed_s=5 * result.elapsed_s)
        self.spent_s += result.elapsed_s
        return result

    def close(self) -> None:
        self._inner.close()


def test_what_else_the_machine_does_is_not_what_steps_cost():
    runner = Busy(plugins.build("backend", "sim", **{k: v / 20 for k, v in COST.items()}))
    found = measure(runner, 512, lambda line: None)
    assert found == pytest.approx(tuple(v / 20 for v in COST.values()), rel=0.05)


@pytest.mark.parametrize("slower", [1, 4, 100])
def test_a_start_is_not_held_up_for_long(slower: float):
    """Beyond 1.5 s of steps only for what a slow machine has to be measured by at all."""
    runner = Busy(plugins.build("backend", "sim", **{k: v * slower for k, v in COST.items()}))
    measure(runner, 512, lambda line: None)
    assert runner.spent_s < max(1.5, 3 * slower)


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

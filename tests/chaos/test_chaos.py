"""Seeds under faults: 20 always, 500 in CI, 100,000 in `make soak`; bugs that must be found."""

from __future__ import annotations

import os

import pytest

from tests.chaos.bugs import BUGS
from tests.chaos.run import first_failure, repeat_line, run
from tests.chaos.simulation import Simulation

FEW, MANY, ALL = 20, 500, 100_000
BATCH = 50


def check(seeds: range) -> None:
    failure = first_failure(seeds)
    if failure is not None:
        seed, error = failure
        raise AssertionError(f"repeat with: {repeat_line(seed)}") from error


@pytest.mark.parametrize("first", range(0, FEW, 5))
def test_few_seeds(first: int) -> None:
    check(range(first, first + 5))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FEW, MANY, BATCH))
def test_many_seeds(first: int) -> None:
    check(range(first, first + BATCH))


@pytest.mark.soak
@pytest.mark.timeout(24 * 3600)
def test_all_seeds() -> None:
    """On all cores; prints how far it is, seeds per second and how to repeat a failure."""
    assert not run(0, ALL, jobs=os.cpu_count() or 1)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found_within_500_seeds(bug: str) -> None:
    with BUGS[bug]():
        assert first_failure(range(MANY)) is not None


def test_a_seed_repeats_event_by_event() -> None:
    runs = []
    for _ in range(2):
        simulation = Simulation(3).run()
        outcomes = simulation.witness.outcomes.by_id
        runs.append((simulation.checks.num_events, simulation.world.now, repr(outcomes)))
    assert runs[0] == runs[1]

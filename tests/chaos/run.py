"""python -m tests.chaos.run --seeds 0:1000: a seed that fails says how to repeat it."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterable

from tests.chaos.simulation import Simulation


def repeat_line(seed: int) -> str:
    return f"python -m tests.chaos.run --seeds {seed}:{seed + 1}"


def first_failure(seeds: Iterable[int]) -> tuple[int, Exception] | None:
    """The first seed that fails, and how; None when all pass."""
    for seed in seeds:
        try:
            Simulation(seed).run()
        except Exception as error:  # whatever a core raises is a finding
            return seed, error
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulates clusters under faults, by seed.")
    parser.add_argument("--seeds", default="0:1000", help="A:B, B not included")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    options = parser.parse_args()
    first, end = map(int, options.seeds.split(":"))
    began, num_events, failed = time.perf_counter(), 0, 0
    for seed in range(first, end):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except Exception as error:  # whatever a core raises is a finding
            failed += 1
            where, at = traceback.extract_tb(error.__traceback__)[-1], simulation.world.now
            print(f"seed {seed} failed at {at:.6f} s in {where.filename}:{where.lineno}")
            print(f"  {type(error).__name__}: {str(error)[:1000]}")
            print(f"  repeat with: {repeat_line(seed)}")
            if options.stop:
                break
        num_events += simulation.checks.num_events
    seconds = time.perf_counter() - began
    count = end - first
    print(
        f"{count} seeds, {failed} failed, {count / seconds:.1f} seeds/s, "
        f"{num_events / seconds:.0f} events/s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

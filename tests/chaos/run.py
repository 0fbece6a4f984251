"""python -m tests.chaos.run --seeds 0:1000 --jobs 2: a seed that fails says how to repeat it."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from tests.chaos.simulation import Simulation

BATCH = 100
"""Seeds of one task of a process."""
COLLECT_EVERY = 10
"""Seeds."""
TOLD_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Batch:
    """What came of some seeds."""

    seeds: int
    events: int
    failures: tuple[str, ...]


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


def run(first: int, end: int, *, jobs: int, stop: bool = False) -> int:
    """Runs seeds in so many processes, prints as it goes; returns how many failed."""
    began = told = time.perf_counter()
    seeds = events = failed = 0
    for batch in _batches(first, end, jobs):
        seeds, events = seeds + batch.seeds, events + batch.events
        failed += len(batch.failures)
        for failure in batch.failures:
            print(failure, flush=True)
        now = time.perf_counter()
        if now - told > TOLD_EVERY_S:
            told = now
            print(f"{seeds} of {end - first} seeds, {seeds / (now - began):.1f}/s", flush=True)
        if failed and stop:
            break
    seconds = time.perf_counter() - began
    print(
        f"{seeds} seeds, {failed} failed, {seeds / seconds:.1f} seeds/s in {jobs} processes, "
        f"{events / seconds:.0f} events/s",
        flush=True,
    )
    return failed


def _batches(first: int, end: int, jobs: int) -> Iterator[Batch]:
    ranges = [range(at, min(at + BATCH, end)) for at in range(first, end, BATCH)]
    if jobs == 1:
        yield from map(_run_batch, ranges)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(_run_batch, ranges)
        finally:
            pool.shutdown(cancel_futures=True)


def _run_batch(seeds: range) -> Batch:
    events, failures = 0, []
    gc.disable()  # a tenth of the time; a simulation leaves one heap of garbage
    try:
        for number, seed in enumerate(seeds):
            if number % COLLECT_EVERY == 0:
                gc.collect()
            simulation = Simulation(seed)
            try:
                simulation.run()
            except Exception as error:  # whatever a core raises is a finding
                failures.append(_report(seed, simulation, error))
            events += simulation.checks.num_events
    finally:
        gc.enable()
    return Batch(len(seeds), events, tuple(failures))


def _report(seed: int, simulation: Simulation, error: Exception) -> str:
    """What went wrong, where, the last commands before it, and how to see it again."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    lines = [
        f"seed {seed} failed at {simulation.world.now:.6f} s in {where.filename}:{where.lineno}",
        f"  {type(error).__name__}: {str(error)[:1000]}",
        *(f"    {line}" for line in simulation.last_commands()),
        f"  repeat with: {repeat_line(seed)}",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulates clusters under faults, by seed.")
    parser.add_argument("--seeds", default="0:1000", help="A:B, B not included")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 0: one a core")
    parser.add_argument("--stop", action="store_true", help="stop behind the first failure")
    options = parser.parse_args()
    first, end = map(int, options.seeds.split(":"))
    jobs = options.jobs or os.cpu_count() or 1
    return 1 if run(first, end, jobs=jobs, stop=options.stop) else 0


if __name__ == "__main__":
    sys.exit(main())

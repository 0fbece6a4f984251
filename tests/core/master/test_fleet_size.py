"""What a large fleet costs the Master, in calls and memory rather than seconds."""

from __future__ import annotations

import gc
import sys
from types import FrameType

import numba
import pytest

from rtp.core.events import From, Tick
from rtp.core.messages import Poll
from tests.support.fleet import Fleet, hashes_of

PERIOD_S = 0.02


class Calls:
    """Counts the calls, of Python and of C, that are made inside it."""

    def __init__(self) -> None:
        self.num = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        self.num += event in ("call", "c_call")


def calls_per_decision(num_ranks: int) -> float:
    """Of an Ask and the Tick that grants it, among idle ranks some of which have the head; the rest
    of each prompt is its own."""
    fleet = Fleet(check=False, max_ranks=2048)
    for i in range(num_ranks // 8):
        worker = fleet.add(f"w{i:03d}", ranks=8)
        if i % 4 == 0:
            fleet.store(worker, hashes_of(range(512)), rank=i % 8)
    prompts = [[*range(512), *range(start, start + 88)] for start in range(1000, 14_000, 1000)]
    for prompt in prompts[:3]:
        fleet.ask(prompt)
    with Calls() as calls:
        for prompt in prompts[3:]:
            fleet.ask(prompt)
    assert len(fleet.grants()) == 13
    return calls.num / 10


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="kernels count as calls of their own")
def test_w12_a_decision_takes_as_many_calls_among_2048_ranks_as_among_64():
    assert calls_per_decision(2048) == pytest.approx(calls_per_decision(64), rel=0.1)


def test_w09_200_workers_at_20_ms_leave_nothing_behind_and_a_slow_one_delays_nobody():
    fleet = Fleet(check=False, max_ranks=2048)
    workers = [fleet.add(f"w{i:03d}") for i in range(200)]
    slow, others = workers[0], workers[1:]

    def beats(periods: int) -> None:
        for _ in range(periods):
            fleet.now += PERIOD_S
            for worker in others:
                answer = fleet.master.handle(From(worker.id, worker.status(1)), fleet.now)
                assert len(fleet.sent(Poll, answer)) <= 1
            fleet.master.handle(Tick(), fleet.now)

    beats(8)
    gc.collect()
    before = sys.getallocatedblocks()
    beats(20)
    gc.collect()
    assert sys.getallocatedblocks() - before < 400, "of 3,980 reports nothing is kept"
    assert fleet.state(slow.id) == "suspect", "it alone is behind"
    assert all(fleet.state(worker.id) == "live" for worker in others)

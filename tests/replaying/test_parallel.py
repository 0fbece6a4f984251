"""Several runs on several cores: results in order, progress told, whatever goes wrong is told."""

from __future__ import annotations

import os

import pytest

from rtp.core.errors import RtpError
from rtp.replaying.parallel import Work, run_all


class Shown:
    def __init__(self) -> None:
        self.moves: dict[int, list[float]] = {}
        self.ends: list[int] = []

    def moved(self, number: int, fraction: float) -> None:
        self.moves.setdefault(number, []).append(fraction)

    def ended(self, number: int) -> None:
        self.ends.append(number)


def counts(number: int) -> Work:
    def work(progress) -> bytes:
        for i in range(1, 4):
            progress(i / 4)
        return bytes([number]) * 100_000

    return work


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_results_come_in_order_with_their_progress(cores: int):
    shown = Shown()
    results = run_all([counts(n) for n in range(5)], cores, shown)
    assert results == [bytes([n]) * 100_000 for n in range(5)]
    assert shown.moves == {n: [0.25, 0.5, 0.75] for n in range(5)}
    assert sorted(shown.ends) == list(range(5))


@pytest.mark.parametrize("cores", [1, 2])
def test_the_reason_of_a_run_that_fails_is_told(cores: int):
    def fails(progress) -> bytes:
        raise RtpError("no such policy")

    with pytest.raises(RtpError, match="no such policy"):
        run_all([counts(0), fails], cores, Shown())


def test_a_process_that_dies_is_told_and_the_others_are_ended():
    pids = os.getpid()

    def dies(progress) -> bytes:
        assert os.getpid() != pids
        os._exit(7)

    def hangs(progress) -> bytes:
        while True:
            progress(0.5)

    with pytest.raises(RtpError, match=r"run 2 died \(exit code 7\)"):
        run_all([hangs, dies], 2, Shown())


def test_a_fault_of_the_code_comes_with_its_traceback():
    def breaks(progress) -> bytes:
        raise ZeroDivisionError("oops")

    with pytest.raises(RtpError, match="oops"):
        run_all([counts(0), breaks], 2, Shown())

"""Points of a box that fill it evenly, however many are taken; then points around the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
SHRINK = 0.35
"""A side of the box around the best point over that of the last one."""


@dataclass(frozen=True, slots=True)
class Range:
    """Values of one parameter. by_ratio: 0.1 to 1 has as many of them as 1 to 10."""

    name: str
    low: float
    high: float
    by_ratio: bool = False

    def at(self, share: float) -> float:
        if self.by_ratio:
            return exp(log(self.low) + share * (log(self.high) - log(self.low)))
        return self.low + share * (self.high - self.low)

    def around(self, value: float) -> Range:
        """A smaller range of the same kind about a value in this one, inside it."""
        if self.by_ratio:
            reach = (self.high / self.low) ** (SHRINK / 2)
            return Range(
                self.name, max(self.low, value / reach), min(self.high, value * reach), True
            )
        reach = SHRINK * (self.high - self.low) / 2
        return Range(self.name, max(self.low, value - reach), min(self.high, value + reach))


Point = dict[str, float]


def points(space: Sequence[Range], count: int, seed: int) -> list[Point]:
    """Halton's sequence, shifted by the seed (Cranley and Patterson, 1976). At most eight ranges.
    Values have four digits: nobody sets more."""
    random = Random(seed)
    shifts = [random.random() for _ in space]
    return [
        {
            each.name: float(f"{each.at((_halton(i, base) + shift) % 1.0):.4g}")
            for each, base, shift in zip(space, PRIMES, shifts, strict=False)
        }
        for i in range(1, count + 1)
    ]


def search(
    space: Sequence[Range],
    start: Point,
    evaluate: Callable[[list[Point]], list[float]],
    *,
    rounds: int,
    points_a_round: int,
    seed: int,
) -> list[tuple[Point, float]]:
    """Every point tried and its value, best (least) first; earlier ones first among equals. start
    is tried with the first round. Each round looks in a smaller box around the best so far."""
    tried: list[tuple[Point, float]] = []
    box = list(space)
    for number in range(rounds):
        some = points(box, points_a_round, seed + number)
        if not number:
            some.insert(0, start)
        tried += zip(some, evaluate(some), strict=True)
        best = min(tried, key=lambda each: each[1])[0]
        box = [each.around(best[each.name]) for each in box]
    return sorted(tried, key=lambda each: each[1])


def _halton(index: int, base: int) -> float:
    share, digit = 0.0, 1.0
    while index:
        digit /= base
        index, rest = divmod(index, base)
        share += digit * rest
    return share

"""A network that is slow, breaks connections and falls apart, by a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from rtp.core.virtual import Network
from tests.chaos.scenario import Trouble

WELL = Trouble(0.0005, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Partition:
    """Nothing passes between one process and some others until a time."""

    until: float
    one: str
    others: frozenset[str]
    hard: bool
    """Connections break; else what is sent arrives when it is over."""
    one_way: bool
    """What the others send to the one arrives."""

    def parts(self, source: str, target: str) -> bool:
        if source == self.one:
            return target in self.others
        return target == self.one and source in self.others and not self.one_way


class FaultyNetwork(Network):
    """Delays are drawn message by message; the virtual cluster keeps each connection in order, so
    messages overtake each other across connections only."""

    def __init__(self, trouble: Trouble, random: Random, now: Callable[[], float]) -> None:
        super().__init__()
        self.trouble = trouble
        self.partitions: list[Partition] = []
        self._random = random
        self._now = now

    def calm(self) -> None:
        self.trouble = WELL
        self.partitions = []

    def delay_s(self, source: str, target: str) -> float | None:
        random, trouble = self._random, self.trouble
        delay = 0.0001 + trouble.jitter_s * random.random()
        for partition in self.partitions:
            if partition.until > self._now() and partition.parts(source, target):
                return None if partition.hard else partition.until - self._now() + delay
        if trouble.drop and random.random() < trouble.drop:
            return None
        if trouble.spike and random.random() < trouble.spike:
            delay += 0.3 * random.random()
        return delay

    def notice_s(self) -> float:
        return self._random.choice([0.0, 0.001, 0.05, 0.7])

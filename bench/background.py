"""What ranks report that take no part in the load: rows that decode, caches that change."""

from __future__ import annotations

import os
from random import Random

from bench.lean_link import LeanLink, LeanRank, clock

DELTA_S = 0.050
KEYS = 16
"""That change of a rank at a time, on average: half are added, half removed."""
ROWS, TOKENS_PER_S = 16, 40.0
"""Sequences that decode on a rank, and what each gains. All together they hold a quarter of the
rank's tokens at first; at half of them new ones take their place."""


class Background:
    """On each link `changing` ranks, in turn, change their caches every 50 ms; all ranks decode.

    Make it before the links open: their caches are full from the start, so that as many keys leave
    as come.
    """

    def __init__(self, links: list[LeanLink], changing: int, seed: int) -> None:
        self._links = links
        self._changing = changing
        self._random = Random(seed)
        self._next_key = -1  # requests' segments count upwards from 0
        self._turns = [0] * len(links)
        self.num_keys = 0
        """Added and removed, so far."""
        start = clock()
        self._due = [start + DELTA_S * i / len(links) for i in range(len(links))]
        for link in links:
            for rank in link.ranks:
                while rank.cache.room > 0:
                    self._add(rank)
                self._begin(rank, start)

    def turn(self, now: float) -> None:
        """Every tick, before the fleet's."""
        for i, link in enumerate(self._links):
            if self._due[i] > now:
                continue
            self._due[i] += DELTA_S
            self._turns[i] += 1
            for offset in range(self._changing):
                self._add(link.ranks[(self._turns[i] + offset) % len(link.ranks)])
            rank = link.ranks[self._turns[i] % len(link.ranks)]
            if rank.context(now) > rank.kv_total // 2:
                rank.end_rows()
                self._begin(rank, now)
            link.arm()

    def _begin(self, rank: LeanRank, now: float) -> None:
        for _ in range(ROWS):
            rank.begin_decode(rank.kv_total // 4 // ROWS, TOKENS_PER_S, now)

    def _add(self, rank: LeanRank) -> None:
        count = self._random.randint(0, KEYS)
        self._next_key -= 1
        self.num_keys += 2 * count
        if count:
            rank.cache.use((self._next_key,), (os.urandom(16 * count),))

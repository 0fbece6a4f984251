"""Which waiting requests start together on the ranks of a lock-step group.

A group is free for new prompts when the slowest of its ranks is: `max over running r of (t_start +
t_prefill)`. What starts together therefore waits together, and each wants company of its own
length. The first request of a round is the best by the order of the window; the others are those
nearest to it in uncached length. Shorter company costs the first nothing; company that would make
it wait more than STRETCH times as long leads, or joins, a later round. (It would wait for this one
in any case; and by the order, at last as overdue, its turn comes.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rtp.core.types import BoolArray, FloatArray, IntArray

STRETCH = 2.0
MOST_TOGETHER = 32
"""Requests of one round: looking at so many takes a few milliseconds."""


def company(
    length: float,
    lengths: FloatArray,
    arrivals: FloatArray,
    eligible: BoolArray,
    count: int,
    at_ease: float = 0.0,
) -> IntArray:
    """Up to `count` of the eligible requests that go best with one of `length`, nearest first.

    All columns [N], one entry per request; the answer holds indices. at_ease: a length so short
    that it keeps nobody waiting. Ties: by arrival, then index. A few array calls, whatever N.
    """
    found = (eligible & (lengths <= max(STRETCH * length, at_ease))).nonzero()[0]
    distance = np.abs(lengths.take(found) - length)
    if len(found) > count:
        limit = np.partition(distance, count - 1)[count - 1]
        near = distance <= limit
        found, distance = found[near], distance[near]
    order = np.lexsort((arrivals.take(found), distance))
    return found[order[:count]]


def fair_company(
    length: float,
    lengths: FloatArray,
    arrivals: FloatArray,
    eligible: BoolArray,
    count: int,
    at_ease: float,
    tenant: IntArray,
    served_s: FloatArray,
    charge_s: Callable[[int], float],
) -> list[int]:
    """As company(), where several tenants wait: each place goes to the tenant that was served least
    by then, of those that have somebody to send.

    tenant [N]: its row.  served_s [N]: of the request's tenant, for its weight.  charge_s(index):
    what a place adds to that. Cost: `count` times that of company().
    """
    found: list[int] = []
    left, served_s = eligible & (lengths <= max(STRETCH * length, at_ease)), served_s.copy()
    while len(found) < count and left.any():
        least = served_s[left].min()
        at = int(company(length, lengths, arrivals, left & (served_s == least), 1, at_ease)[0])
        found.append(at)
        left[at] = False
        served_s[tenant == tenant[at]] += charge_s(at)
    return found

"""Which waiting request is looked at next: one pass over the window, some ns for each of them."""

from __future__ import annotations

from math import inf

from rtp.core.kernels import kernel
from rtp.core.types import BoolArray, FloatArray, IntArray

SLOT = ("arrival", "urgency", "limit", "need", "deadline", "length", "eligible", "tenant")
"""Columns of the window, [slots, SLOT]; what they mean stands there."""
ARRIVAL, URGENCY, LIMIT, NEED, DEADLINE, LENGTH, ELIGIBLE, TENANT = range(len(SLOT))


@kernel("i8(f8[:, ::1], i8[::1], f8[::1], b1[::1], f8, f8, i8[::1])")
def next_slots(
    slots: FloatArray,
    among: IntArray,
    virtual_s: FloatArray,
    turn: BoolArray,
    now: float,
    room: float,
    found: IntArray,
) -> int:
    """Writes the slot of the next one to `found` [slots], and of those that came at the same time
    and stand as high; returns how many.

    among: the slots that take part; empty: all. virtual_s, turn: of the tenants
    (core/master/shares). Of those that need at most `room`, and of overdue ones of tenants whose
    turn for them it is whatever they need, the least served tenant's go first; of these an overdue
    one if it is its turn, the oldest; else the highest ratio.
    """
    count = 0
    best_served, best_late, best_score, best_arrival = inf, False, -inf, inf
    everybody = among.shape[0] == 0
    for n in range(slots.shape[0] if everybody else among.shape[0]):
        i = n if everybody else among[n]
        slot = slots[i]
        if slot[ELIGIBLE] == 0.0:
            continue
        tenant, age = int(slot[TENANT]), now - slot[ARRIVAL]
        late = turn[tenant] and age > slot[LIMIT]
        if not late and slot[NEED] > room:
            continue
        served, score = virtual_s[tenant], 0.0 if late else age * slot[URGENCY]
        if count:
            if served != best_served:
                if served > best_served:
                    continue
            elif late != best_late:
                if best_late:
                    continue
            elif score != best_score:
                if score < best_score:
                    continue
            elif slot[ARRIVAL] > best_arrival:
                continue
            elif slot[ARRIVAL] == best_arrival:
                found[count] = i
                count += 1
                continue
        found[0], count = i, 1
        best_served, best_late, best_score, best_arrival = served, late, score, slot[ARRIVAL]
    return count


@kernel("i8(f8[:, ::1], f8, f8, i8[::1], f8[::1])")
def shortlist(
    slots: FloatArray, now: float, room: float, found: IntArray, scores: FloatArray
) -> int:
    """Writes the slots of the highest ratios, of those that need at most `room`, to `found` [n], in
    no order. Returns how many, negative where one that waits is overdue.

    scores: [n + 1]; the last of them is set to the highest ratio that is not among those found.
    """
    count, lowest, late = 0, 0, False
    most = found.shape[0]
    scores[most] = -inf
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot[ELIGIBLE] == 0.0:
            continue
        age = now - slot[ARRIVAL]
        late = late or age > slot[LIMIT]
        score = age * slot[URGENCY]
        if slot[NEED] > room:
            continue
        at = count
        if count < most:
            count += 1
        elif score > scores[lowest]:
            scores[most] = max(scores[most], scores[lowest])
            at = lowest
        else:
            scores[most] = max(scores[most], score)
            continue
        found[at], scores[at] = i, score
        if count == most:
            lowest = 0
            for n in range(1, most):
                if scores[n] < scores[lowest]:
                    lowest = n
    return -count if late else count

"""Which ranks may take a request, which of them may win, and which one does.

Kernels over the columns and flags of a View (core/master/load), a few us for a thousand ranks. A
policy that promises to be monotone is shown the contenders only: an idle rank with the longest
match of the idle ones, those that have more of the prompt than it, and the chat's own, for ties. No
other can win: where it has no more of the prompt, the idle one is no worse off.
"""

from __future__ import annotations

from math import inf, isfinite, isnan, nan

import numpy as np

from rtp.core.kernels import kernel
from rtp.core.master.load import IDLE, LOAD, OFFERED, READY, ROOM, WAIT_S
from rtp.core.types import BoolArray, FloatArray, IntArray

ROUND_DIGITS = 6
DIGITS = 10.0**ROUND_DIGITS
"""Scores are compared in whole microseconds, so that every machine decides alike."""
ROUNDING = 2.0 / DIGITS
SMALLEST_PART = 1e-15
"""Scores that differ by more than one of these, the second times their size, never round alike."""
ANY = -1
NONE, NO_NUMBER = -1, -2
NUM_TOLD = 5
"""Numbers that tell() writes of a rank."""


@kernel("void(Array(f8, 1, 'C', readonly=True), i8[::1], f8, f8, f8[::1])")
def matched_tokens(
    device: FloatArray, rows: IntArray, block_size: float, most: float, matched: FloatArray
) -> None:
    """device: [capacity] blocks. Writes tokens, at most `most`, to `matched` [R]."""
    for i in range(rows.shape[0]):
        matched[i] = min(device[rows[i]] * block_size, most)


@kernel("f8(f8[:, ::1], b1[:, ::1], i8)")
def most_room(columns: FloatArray, flags: BoolArray, but: int) -> float:
    """Tokens that a request may need on the ready rank with the most room, one left out; minus
    infinity where none is ready."""
    most = -inf
    for i in range(columns.shape[1]):
        if flags[READY, i] and columns[ROOM, i] > most and i != but:
            most = columns[ROOM, i]
            if most == inf:
                break
    return float(most)


@kernel("i8(b1[:, ::1], f8[::1], b1[::1])")
def idlest(flags: BoolArray, matched: FloatArray, among: BoolArray) -> int:
    """The idle rank of `among` with the longest match, the first of equal ones; -1: none."""
    best, most = NONE, -1.0
    for i in range(matched.shape[0]):
        if flags[IDLE, i] and among[i] and matched[i] > most:
            best, most = i, matched[i]
    return best


@kernel(
    "UniTuple(i8, 3)(f8[:, ::1], b1[:, ::1], f8[::1], b1[::1], f8, b1, b1, i8, b1[::1], i8[::1])"
)
def candidates(
    columns: FloatArray,
    flags: BoolArray,
    matched: FloatArray,
    allowed: BoolArray,
    whole: float,
    holds: bool,
    prunes: bool,
    own: int,
    mask: BoolArray,
    few: IntArray,
) -> tuple[int, int, int]:
    """Ranks with room for `whole` tokens less what is matched; holds: busy ones as well.

    allowed: [R]; own: the chat's rank, or -1. Returns how many ready ranks can take it, how many
    candidates there are, and how many contenders, -1 where all contend. Writes who is a candidate
    to `mask` [R], and where the contenders stand, ascending, to `few` [R].
    """
    base = OFFERED if holds else READY
    num_ready, num = 0, 0
    for i in range(matched.shape[0]):
        fits = allowed[i] and columns[ROOM, i] >= whole - matched[i]
        mask[i] = fits and flags[base, i]
        num += 1 if mask[i] else 0
        num_ready += 1 if fits and flags[READY, i] else 0
    if not (prunes and num_ready):
        return num_ready, num, NONE
    best = idlest(flags, matched, mask)
    if best < 0:
        return num_ready, num, NONE
    count, least = 0, matched[best]
    for i in range(matched.shape[0]):
        if mask[i] and (matched[i] > least or i in (best, own)):
            few[count] = i
            count += 1
    return num_ready, num, count


@kernel(
    "i8(Array(f8, 1, 'C', readonly=True), i8[::1], b1[::1], i8[::1], i8,"
    " f8[:, ::1], b1[:, ::1], i8)"
)
def winner(
    scores: FloatArray,
    at: IntArray,
    mask: BoolArray,
    kinds: IntArray,
    kind: int,
    columns: FloatArray,
    flags: BoolArray,
    own: int,
) -> int:
    """The highest score; of those that are equal in whole microseconds a ready rank, the chat's
    own, the least loaded, the first.

    scores: [n] of the ranks at `at` [n] of the View; an empty `at` means all. mask: [R], which
    ranks take part; kinds: [R], of which only `kind` take part, unless it is ANY. Returns an index
    into scores; NONE: nobody takes part; NO_NUMBER: a score is NaN.
    """
    top, num = -inf, 0
    everyone = at.shape[0] == 0
    for n in range(scores.shape[0]):
        i = n if everyone else at[n]
        if not mask[i] or (kind != ANY and kinds[i] != kind):
            continue
        if isnan(scores[n]):
            return NO_NUMBER
        num += 1
        top = max(top, scores[n])
    if not num:
        return NONE
    slack = ROUNDING + SMALLEST_PART * abs(top) if isfinite(top) else 0.0
    best, best_value, best_ready, best_load = NONE, nan, False, inf
    best_own = False
    for n in range(scores.shape[0]):
        i = n if everyone else at[n]
        if not mask[i] or (kind != ANY and kinds[i] != kind) or scores[n] < top - slack:
            continue
        value = np.rint(scores[n] * DIGITS)
        ready, load, mine = flags[READY, i], columns[LOAD, i], i == own
        better = best == NONE or value > best_value
        if not better and value == best_value:
            if ready != best_ready:
                better = ready
            elif mine != best_own:
                better = mine
            else:
                better = load < best_load and not best_own
        if better:
            best, best_value, best_ready, best_load, best_own = n, value, ready, load, mine
    return best


@kernel("i8(Array(f8, 1, 'C', readonly=True), i8[::1], b1[::1], i8, i8[::1])")
def ranking(scores: FloatArray, at: IntArray, mask: BoolArray, first: int, told: IntArray) -> int:
    """Writes the best of those that take part to `told`, `first` before all others; returns how
    many. scores, at, mask: as for winner(); indices into scores."""
    told[0], count = first, 1
    everyone = at.shape[0] == 0
    while count < told.shape[0]:
        best = NONE
        for n in range(scores.shape[0]):
            if not mask[n if everyone else at[n]] or (best >= 0 and scores[n] <= scores[best]):
                continue
            known = False
            for other in told[:count]:
                known = known or n == other
            if not known:
                best = n
        if best < 0:
            break
        told[count] = best
        count += 1
    return count


@kernel(
    "i8(Array(f8, 1, 'C', readonly=True), i8[::1], b1[::1], i8[::1], f8[:, ::1], f8[::1],"
    " Array(f8, 2, 'C', readonly=True), f8, i8, i8[::1], f8[:, ::1])"
)
def tell(
    scores: FloatArray,
    at: IntArray,
    mask: BoolArray,
    rows: IntArray,
    columns: FloatArray,
    matched: FloatArray,
    coefficients: FloatArray,
    num_tokens: float,
    first: int,
    order: IntArray,
    told: FloatArray,
) -> int:
    """Writes row, score, matched tokens, wait and predicted prefill of the best, as ranking() puts
    them in order, to `told` [n, NUM_TOLD]; returns how many.

    rows, matched: [R]; columns: [VIEW, R]; coefficients: [6, R] or [6, 1], all of the View.
    num_tokens: of the prompt. order: [n], room for their order.
    """
    count = ranking(scores, at, mask, first, order)
    for n in range(count):
        index = order[n]
        i = at[index] if at.shape[0] else index
        k = i if coefficients.shape[1] > 1 else 0
        a, b, c = coefficients[0, k], coefficients[1, k], coefficients[2, k]
        cached = matched[i]
        new = num_tokens - cached
        told[n, 0], told[n, 1], told[n, 2] = rows[i], scores[index], cached
        told[n, 3], told[n, 4] = columns[WAIT_S, i], a + new * (b + c * (cached + 0.5 * new))
    return count

"""Where a request would go on, and who may win when ranks prefill for others.

Kernels over the columns and flags of a View (core/master/load); what they are for stands in
core/master/pairing.
"""

from __future__ import annotations

from math import inf

import numpy as np

from rtp.core.kernels import kernel
from rtp.core.master.contenders import DIGITS, NONE
from rtp.core.master.load import (
    CONTEXT_TOKENS,
    IDLE,
    NUM_REQUESTS,
    NUMBERED,
    OFFERED,
    OPEN,
    READY,
    ROOM,
    WAIT_S,
)
from rtp.core.types import BoolArray, FloatArray, IntArray

PREFILL, FUSED, DECODE = 0, 1, 2
"""What a rank is for."""
REACHABLE, LATENCY_S, PAGE_S = 0, 1, 2
"""Facts of a decode rank: whether a prefill rank can hand over to it, and seconds of that, at first
and for a token."""


@kernel(
    "UniTuple(f8, 5)(f8[:, ::1], b1[:, ::1], f8[::1], b1[::1], Array(f8, 2, 'C', readonly=True),"
    " i8[::1], f8[:, ::1], f8[::1], f8, f8, f8, i8)"
)
def best_partner(
    columns: FloatArray,
    flags: BoolArray,
    matched: FloatArray,
    allowed: BoolArray,
    coefficients: FloatArray,
    partners: IntArray,
    facts: FloatArray,
    token_s: FloatArray,
    num_tokens: float,
    choices: float,
    output: float,
    own: int,
) -> tuple[float, float, float, float, float]:
    """The decode rank for a request: its place in `partners` or -1, its time per output token, the
    transfer, the headroom left there, the prompt tokens to bring. own: the chat's, or -1.

    partners: [P] places in the View; facts: [3, P]. Writes the time per output token on each to
    `token_s` [P].
    """
    best, best_cost, best_headroom = NONE, inf, 0.0
    whole = num_tokens + choices * output
    for p in range(partners.shape[0]):
        at = partners[p]
        some = at if coefficients.shape[1] > 1 else 0
        d, e, f = coefficients[3, some], coefficients[4, some], coefficients[5, some]
        base_s = d + e * columns[NUM_REQUESTS, at] + f * columns[CONTEXT_TOKENS, at]
        token_s[p] = base_s + (e * choices + f * (choices * num_tokens))
        headroom = columns[ROOM, at] + matched[at] - whole
        able = facts[REACHABLE, p] != 0.0 and flags[NUMBERED, at] and flags[OPEN, at]
        if not (able and allowed[at] and headroom >= 0.0):
            continue
        transfer_s = facts[LATENCY_S, p] + facts[PAGE_S, p] * (num_tokens - matched[at])
        cost = np.rint((token_s[p] + transfer_s / output) * DIGITS)
        if p == own:
            cost = -inf
        if cost < best_cost or (cost == best_cost and headroom > best_headroom):
            best, best_cost, best_headroom = p, cost, headroom
    if best < 0:
        return -1.0, 0.0, 0.0, 0.0, 0.0
    tokens = num_tokens - matched[partners[best]]
    transfer_s = facts[LATENCY_S, best] + facts[PAGE_S, best] * tokens
    return float(best), float(token_s[best]), float(transfer_s), float(best_headroom), float(tokens)


@kernel(
    "UniTuple(i8, 4)(f8[:, ::1], b1[:, ::1], f8[::1], b1[::1], Array(f8, 2, 'C', readonly=True),"
    " i8[::1], i8[::1], i8[::1], f8[::1], f8, f8, f8, b1, i8, f8, b1, b1, i8, b1[::1], i8[::1])"
)
def pair_candidates(
    columns: FloatArray,
    flags: BoolArray,
    matched: FloatArray,
    allowed: BoolArray,
    coefficients: FloatArray,
    kinds: IntArray,
    transports: IntArray,
    partners: IntArray,
    token_s: FloatArray,
    num_tokens: float,
    choices: float,
    output: float,
    short: bool,
    theirs: int,
    after_s: float,
    holds: bool,
    prunes: bool,
    own: int,
    mask: BoolArray,
    few: IntArray,
) -> tuple[int, int, int, int]:
    """contenders.candidates() where ranks prefill for others: how many ranks fit the request, how
    many of those are ready, how many are candidates, how many contend.

    A rank needs room for all where the request ends there, and for the prompt where it is handed
    over or ends with its first tokens (`short`). theirs: transports of the decode rank found for
    it, 0 for none; after_s: its seconds from the prefill to the end by that one.

    All contend where no prefill rank is idle, or where a decode rank might be better off with the
    prefill; also where there are fused ranks.
    """
    base = OFFERED if holds else READY
    whole, prompt = num_tokens + choices * output, num_tokens + choices
    num_fits, num_ready, num, fused = 0, 0, 0, False
    best, most = NONE, -1.0
    for i in range(matched.shape[0]):
        hands = kinds[i] == PREFILL
        fused = fused or kinds[i] == FUSED
        mask[i] = False
        if not allowed[i] or (hands and not short and not transports[i] & theirs):
            continue
        if columns[ROOM, i] + matched[i] < (prompt if hands else whole):
            continue
        num_fits += 1
        num_ready += 1 if flags[READY, i] else 0
        mask[i] = flags[base, i]
        num += 1 if mask[i] else 0
        if hands and flags[IDLE, i] and matched[i] > most:
            best, most = i, matched[i]
    if best < 0 or not prunes or fused or (not short and not theirs):
        return num_fits, num_ready, num, NONE
    if not short:
        a, b, c = coefficients[0, 0], coefficients[1, 0], coefficients[2, 0]
        new = num_tokens - most
        prefill_s = a + new * (b + c * (most + 0.5 * new))
        for p in range(partners.shape[0]):
            there_s = columns[NUM_REQUESTS, partners[p]] * prefill_s + output * token_s[p]
            if there_s <= after_s:
                return num_fits, num_ready, num, NONE
    count = 0
    for i in range(matched.shape[0]):
        if mask[i] and (matched[i] > most or i in (best, own)):
            few[count] = i
            count += 1
    return num_fits, num_ready, num, count


@kernel("f8(f8[:, ::1], b1[:, ::1], i8[::1])")
def room_to_end(columns: FloatArray, flags: BoolArray, kinds: IntArray) -> float:
    """The most that any rank offers on which a request could end."""
    most = -inf
    for i in range(kinds.shape[0]):
        if kinds[i] != PREFILL and flags[OPEN, i] and columns[ROOM, i] > most:
            most = columns[ROOM, i]
    return float(most)


@kernel(
    "f8(f8[:, ::1], b1[:, ::1], f8[::1], b1[::1], Array(f8, 2, 'C', readonly=True),"
    " i8[::1], i8[::1], i8, f8, f8, b1)"
)
def least_in_line_s(
    columns: FloatArray,
    flags: BoolArray,
    matched: FloatArray,
    allowed: BoolArray,
    coefficients: FloatArray,
    kinds: IntArray,
    transports: IntArray,
    theirs: int,
    num_tokens: float,
    choices: float,
    short: bool,
) -> float:
    """Least predicted seconds to the end of the prefill on a busy prefill rank; infinite without
    one. Ready ones have no line: the policy did not want them, and they took part all the same."""
    least = inf
    for i in range(kinds.shape[0]):
        if kinds[i] != PREFILL or flags[READY, i] or not allowed[i]:
            continue
        if not short and not transports[i] & theirs:
            continue
        if columns[ROOM, i] + matched[i] < num_tokens + choices:
            continue
        some = i if coefficients.shape[1] > 1 else 0
        a, b, c = coefficients[0, some], coefficients[1, some], coefficients[2, some]
        new = num_tokens - matched[i]
        least = min(least, columns[WAIT_S, i] + (a + new * (b + c * (matched[i] + 0.5 * new))))
    return float(least)

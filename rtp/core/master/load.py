"""What a rank has to do, from its last report and what was granted since: the formulas.

Kernels over the rank table [capacity, NUM_COLUMNS] (core/master/columns). Seconds, tokens.
"""

from __future__ import annotations

from math import inf

from rtp.core.kernels import kernel
from rtp.core.master.columns import (
    BUDGET,
    BUSY_UNTIL,
    CHARGED_REQUESTS,
    CHARGED_TOKENS,
    CONTEXT,
    DECODE_ROWS,
    HELD,
    HELD_S,
    KV_FREE,
    KV_TOTAL,
    MASK,
    MOST_REQUESTS,
    NEXT_NUMBER,
    NUM_REPORTED,
    NUM_UNSEEN,
    PARKED,
    PREFILL,
    PROMPT_S,
    PROMPT_TOKENS,
    REFUSED,
    REPORTED_AT,
    RESERVED,
    RUNNING,
    SEEN_UPTO,
    STEP_AGE_US,
    UPTO,
    WAITING,
)
from rtp.core.policy import TABLE
from rtp.core.types import BoolArray, FloatArray, IntArray

MASK_BITS = 64
MOST_HELD = 3
"""Requests that may wait for one busy rank. One costs tail latency, many make a herd."""
US = 1e-6

VIEW = (
    *TABLE,
    *("busy_s", "room", "load", "reported_at", "ends_at", "held_s", "num_held"),
)
"""Columns of a View; what they mean stands there."""
MATCHED, WAIT_S, PREFILL_TOKENS, NUM_REQUESTS, ROWS, CONTEXT_TOKENS, FREE, TOTAL = range(8)
BUSY_S, ROOM, LOAD, HEARD_AT, ENDS_AT, BEHIND_S, NUM_HELD = range(8, len(VIEW))
FLAGS = ("open", "numbered", "empty", "takes_held", "ready", "idle", "offered")
OPEN, NUMBERED, EMPTY, TAKES_HELD, READY, IDLE, OFFERED = range(len(FLAGS))


@kernel("f8(f8[:, ::1], f8[:, ::1], i8, i8)")
def work_s(table: FloatArray, profiles: FloatArray, row: int, hardware: int) -> float:
    """Seconds until the prefill work of a rank ends: tokens left over tokens per second, in chunks
    of what the step budget leaves beside the decode rows, less what the step in flight has run
    already. A token's seconds are those predicted for the grants whose prompts they are, which
    know what is cached before it: behind a long context it may take twice as long. profiles:
    [classes, 6]."""
    rank = table[row]
    tokens = rank[PREFILL] + rank[CHARGED_TOKENS]
    if tokens <= 0.0:
        return 0.0
    batch = rank[DECODE_ROWS]
    chunk = max(min(tokens, rank[BUDGET] - batch), 1.0)
    a, b, c, d, e, f = profiles[hardware]
    if tokens <= rank[PROMPT_TOKENS]:
        step_s = chunk * rank[PROMPT_S] / rank[PROMPT_TOKENS]
    else:  # some of it is not of this Master
        step_s = a + chunk * (b + c * (0.5 * chunk))
    if batch > 0.0:
        step_s += d + e * batch + f * rank[CONTEXT]
    return float(tokens / chunk * step_s - min(US * rank[STEP_AGE_US], step_s))


@kernel("b1(f8[:, ::1], i8[::1])")
def any_unseen(table: FloatArray, rows: IntArray) -> bool:
    """Whether one of these ranks was given a grant that no report has seen."""
    num = 0.0
    for row in rows:
        num += table[row, NUM_UNSEEN]
    return num > 0.0


@kernel(
    "void(f8[:, ::1], b1[::1], i8[::1], f8[:, ::1], i8[::1], Array(i8, 2, 'C', readonly=True), f8)"
)
def take_in(
    table: FloatArray,
    stale: BoolArray,
    classes: IntArray,
    profiles: FloatArray,
    rows: IntArray,
    told: IntArray,
    now: float,
) -> None:
    """A Status, and anew when each rank's prefill work ends. told: [ranks, STATUS_COLUMNS] of the
    ranks in `rows`; stale, classes: [capacity]."""
    for rank in range(rows.shape[0]):
        row = rows[rank]
        stale[row] = True
        for column in range(NUM_REPORTED):
            table[row, column] = told[rank, column]
        upto, mask = told[rank, UPTO], told[rank, MASK]
        seen = max(int(table[row, SEEN_UPTO]), upto)
        while seen - upto < MASK_BITS and mask >> (seen - upto) & 1:
            seen += 1  # a worker's own count begins before the first number there was
        table[row, SEEN_UPTO] = seen
        table[row, REFUSED] = 0.0
        table[row, REPORTED_AT] = now
        table[row, BUSY_UNTIL] = now + work_s(table, profiles, row, classes[row])


@kernel("b1(f8[:, ::1], i8, i8, f8, f8, f8, f8)")
def charge(
    table: FloatArray,
    row: int,
    number: int,
    tokens: float,
    reserved: float,
    prefill_s: float,
    now: float,
) -> bool:
    """A grant's load. number: the rank's next one, negative where it is none of the rank's. False,
    and nothing is charged, where it is out of order."""
    rank = table[row]
    if number >= 0:
        if number != rank[NEXT_NUMBER]:
            return False
        rank[NEXT_NUMBER] += 1.0
        rank[NUM_UNSEEN] += 1.0
    rank[CHARGED_TOKENS] += tokens
    rank[CHARGED_REQUESTS] += 1.0
    rank[RESERVED] += reserved
    rank[PROMPT_TOKENS] += tokens
    rank[PROMPT_S] += prefill_s
    rank[BUSY_UNTIL] = max(rank[BUSY_UNTIL], now) + prefill_s
    return True


@kernel("void(f8[:, ::1], i8, f8, f8)")
def prompt_done(table: FloatArray, row: int, tokens: float, prefill_s: float) -> None:
    """A grant's prompt is no work any more."""
    rank = table[row]
    rank[PROMPT_TOKENS] -= tokens
    rank[PROMPT_S] = rank[PROMPT_S] - prefill_s if rank[PROMPT_TOKENS] > 0.0 else 0.0


@kernel("void(f8[:, ::1], i8, b1, f8, f8, f8)")
def give_back(
    table: FloatArray, row: int, numbered: bool, tokens: float, reserved: float, busy_s: float
) -> None:
    """Load of a grant that is charged no more. numbered: it was given a number of the rank."""
    rank = table[row]
    if numbered:
        rank[NUM_UNSEEN] -= 1.0
    rank[CHARGED_TOKENS] -= tokens
    rank[CHARGED_REQUESTS] -= 1.0
    rank[RESERVED] -= reserved
    rank[BUSY_UNTIL] -= busy_s


@kernel("void(f8[:, ::1], i8, i8, f8[:, ::1], b1[:, ::1])")
def look_at(table: FloatArray, row: int, at: int, columns: FloatArray, flags: BoolArray) -> None:
    """What a View has of one rank, but for what time changes. columns: [VIEW, R], flags:
    [FLAGS, R]; at: its place there."""
    rank = table[row]
    prefill = rank[PREFILL] + rank[CHARGED_TOKENS]
    requests = rank[RUNNING] + rank[WAITING] + rank[CHARGED_REQUESTS]
    expected = prefill + rank[RESERVED]
    load = expected + rank[CONTEXT]
    is_open = requests - rank[PARKED] < rank[MOST_REQUESTS] and rank[REFUSED] == 0.0
    columns[PREFILL_TOKENS, at] = prefill
    columns[NUM_REQUESTS, at] = requests
    columns[ROWS, at] = rank[DECODE_ROWS]
    columns[CONTEXT_TOKENS, at] = rank[CONTEXT]
    columns[FREE, at] = rank[KV_FREE]
    columns[TOTAL, at] = rank[KV_TOTAL]
    columns[ROOM, at] = rank[KV_FREE] - expected if requests != 0.0 else inf
    columns[LOAD, at] = load
    columns[HEARD_AT, at] = rank[REPORTED_AT]
    columns[ENDS_AT, at] = rank[BUSY_UNTIL]
    columns[BEHIND_S, at] = rank[HELD_S]
    columns[NUM_HELD, at] = rank[HELD]
    flags[OPEN, at] = is_open
    flags[NUMBERED, at] = rank[NEXT_NUMBER] - rank[SEEN_UPTO] <= MASK_BITS
    flags[EMPTY, at] = requests == 0.0 and load == 0.0
    flags[TAKES_HELD, at] = is_open and rank[HELD] < MOST_HELD


@kernel("void(i8, f8, f8, f8[:, ::1], b1[:, ::1])")
def see_time(at: int, now: float, lead_s: float, columns: FloatArray, flags: BoolArray) -> None:
    """What time changes of one rank."""
    busy_s = max(columns[ENDS_AT, at] - now, 0.0)
    wait_s = busy_s + columns[BEHIND_S, at]
    ready = flags[OPEN, at] and flags[NUMBERED, at] and busy_s < lead_s
    columns[BUSY_S, at] = busy_s
    columns[WAIT_S, at] = wait_s
    flags[READY, at] = ready
    flags[IDLE, at] = ready and wait_s == 0.0 and flags[EMPTY, at]
    flags[OFFERED, at] = ready or flags[TAKES_HELD, at]


@kernel("void(f8[:, ::1], b1[::1], i8[::1], f8, f8, f8[:, ::1], b1[:, ::1])")
def survey(
    table: FloatArray,
    stale: BoolArray,
    rows: IntArray,
    now: float,
    lead_s: float,
    columns: FloatArray,
    flags: BoolArray,
) -> None:
    """A View at another time: looks at the ranks that changed since the last one. stale:
    [capacity]; cleared for these rows."""
    for at in range(rows.shape[0]):
        row = rows[at]
        if stale[row]:
            stale[row] = False
            look_at(table, row, at, columns, flags)
        see_time(at, now, lead_s, columns, flags)


@kernel("f8(f8[:, ::1], f8, f8)")
def next_end_s(columns: FloatArray, now: float, lead_s: float) -> float:
    """Seconds until the first rank is through of those whose prefill work lasts for the lead or
    longer; infinite where there is none."""
    first = inf
    for at in range(columns.shape[1]):
        busy_s = columns[ENDS_AT, at] - now
        if lead_s <= busy_s < first:
            first = busy_s
    return float(first)


@kernel("i8(f8[:, ::1], f8, i8[::1])")
def wanted(columns: FloatArray, lead_s: float, found: IntArray) -> int:
    """Ranks with less prefill work than the lead for which requests are held. Writes where they
    stand to `found` [R], returns how many."""
    count = 0
    for at in range(columns.shape[1]):
        if columns[NUM_HELD, at] > 0.0 and columns[BUSY_S, at] < lead_s:
            found[count] = at
            count += 1
    return count

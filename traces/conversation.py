"""A trace in the form of Mooncake's conversation trace: one head block in every request,
conversations that grow from turn to turn, arrivals on a grid of 3 s."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from rtp.core.trace import TraceRow
from rtp.io.traces import MOONCAKE_BLOCK, write_mooncake

SEED = 1
SECONDS = 300.0
RATE = 3.4
"""Requests a second."""
TURNS = 1.63
"""Mean requests of a conversation: requests over children of the head block."""
GRID_S = 3.0
THINK_S, THINK_SPREAD = 120.0, 0.8
"""Median of the time between two turns, and sigma of its logarithm."""
OPENING, OPENING_SPREAD = 5900.0, 1.12
"""Median tokens of a first prompt, and sigma of its logarithm."""
QUESTION, QUESTION_SPREAD = 500.0, 1.2
"""The same of what a later prompt adds beside the answer before it."""
OUTPUT_SHAPE, OUTPUT_SCALE, MOST_OUTPUT = 3.6, 98.0, 2000
LEAST_INPUT, MOST_INPUT = 890, 126_000
HEAD = 0
WARM_UP_S = 1800.0
"""Conversations under way when the sample starts began up to so long before."""


@dataclass(slots=True)
class _Chat:
    num_tokens: int
    blocks: list[int] = field(default_factory=lambda: [HEAD])
    """Whole blocks of the prompt so far."""
    turns: int = 0


def write(path: Path) -> None:
    write_mooncake(path, generate(SEED, SECONDS))


def generate(seed: int, seconds: float) -> list[TraceRow]:
    """Rows of one sample; block numbers are dense, in the order of their first use."""
    random = Random(seed)
    fresh = count(1)
    rows: list[TraceRow] = []
    numbers = {HEAD: HEAD}
    order = count()
    start = -WARM_UP_S
    due = [(start, next(order), _Chat(_opening(random)))]
    while due:
        at, _, chat = heapq.heappop(due)
        if at >= seconds:
            continue
        if not chat.turns:
            gap = random.expovariate(RATE / TURNS)
            heapq.heappush(due, (at + gap, next(order), _Chat(_opening(random))))
        chat.turns += 1
        size = MOONCAKE_BLOCK
        chat.blocks += [next(fresh) for _ in range(chat.num_tokens // size - len(chat.blocks))]
        output = min(MOST_OUTPUT, 1 + round(random.gammavariate(OUTPUT_SHAPE, OUTPUT_SCALE)))
        if at >= 0:
            partly = [next(fresh)] if chat.num_tokens % size else []
            ids = [numbers.setdefault(b, len(numbers)) for b in [*chat.blocks, *partly]]
            grid = math.floor(at / GRID_S) * GRID_S
            rows.append(TraceRow(grid, chat.num_tokens, output, tuple(ids)))
        question = random.lognormvariate(math.log(QUESTION), QUESTION_SPREAD)
        chat.num_tokens += output + round(question)
        think = random.lognormvariate(math.log(THINK_S), THINK_SPREAD)
        if random.random() < 1 - 1 / TURNS and chat.num_tokens <= MOST_INPUT:
            heapq.heappush(due, (at + think, next(order), chat))
    return rows


def _opening(random: Random) -> int:
    tokens = random.lognormvariate(math.log(OPENING), OPENING_SPREAD)
    return round(min(max(tokens, LEAST_INPUT), MOST_INPUT))

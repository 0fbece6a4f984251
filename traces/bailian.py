"""A trace in the form of Qwen-Bailian's: 16-token blocks, single requests that share the prompt of
their application, conversations, numbers that name a block's content alone."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from traces.draw import write_jsonl

SEED, ROWS = 1, 500
BLOCK = 16
RATE = 4.0
APPS, POPULARITY = 60, 1.1
"""Applications, and how steeply fewer requests each has (Zipf)."""
PROMPT, QUESTION, ANSWER, SIGMA = 480, 300, 220, 0.7
"""Medians of log-normal lengths, in tokens: an application's prompt, what is asked, what is
answered."""
TURNS, THINK_S = 1.5, 60.0
REPEATED = 0.014
"""Share of blocks whose content stands elsewhere too, behind other text."""
KINDS = ("text", "search", "image", "file")
KIND_SHARES = (0.8, 0.1, 0.06, 0.04)


@dataclass(slots=True)
class _Chat:
    kind: str
    blocks: list[int]
    parent: int = -1
    turn: int = 1
    answer: int = 0
    tail: int = field(default=0)
    """Tokens behind the whole blocks."""


def write(path: Path) -> None:
    write_jsonl(path, generate(SEED, ROWS))


def generate(seed: int, num_rows: int) -> list[dict[str, Any]]:  # Any: what JSON holds
    """Rows by time."""
    random, content = Random(seed), count(APPS)
    prompts = [
        [next(content) for _ in range(_tokens(random, PROMPT) // BLOCK)] for _ in range(APPS)
    ]
    weights = [(rank + 1) ** -POPULARITY for rank in range(APPS)]
    rows: list[dict[str, Any]] = []
    later: list[tuple[float, int, _Chat]] = []
    at = 0.0
    while len(rows) < num_rows:
        at += random.expovariate(RATE / TURNS)
        while later and later[0][0] < at:
            then, _, chat = heapq.heappop(later)
            _ask(random, content, rows, later, then, chat)
        prompt = random.choices(prompts, weights)[0]
        kind = random.choices(KINDS, KIND_SHARES)[0]
        _ask(random, content, rows, later, at, _Chat(kind, list(prompt)))
    return rows[:num_rows]


def _ask(
    random: Random,
    content: count[int],
    rows: list[dict[str, Any]],
    later: list[tuple[float, int, _Chat]],
    at: float,
    chat: _Chat,
) -> None:
    """One request; perhaps plans the turn after it."""
    grown = chat.tail + chat.answer + _tokens(random, QUESTION)
    for _ in range(grown // BLOCK):
        again = random.random() < REPEATED
        chat.blocks.append(random.choice(chat.blocks) if again else next(content))
    chat.tail, chat.answer = grown % BLOCK, _tokens(random, ANSWER)
    number = len(rows)
    rows.append(
        {
            "chat_id": number,
            "parent_chat_id": chat.parent,
            "timestamp": round(at, 3),
            "input_length": BLOCK * len(chat.blocks) + chat.tail,
            "output_length": chat.answer,
            "type": chat.kind,
            "turn": chat.turn,
            "hash_ids": [*chat.blocks, *([next(content)] if chat.tail else [])],
        }
    )
    chat.parent, chat.turn = number, chat.turn + 1
    if random.random() < 1 - 1 / TURNS:
        heapq.heappush(later, (at + random.expovariate(1 / THINK_S), number, chat))


def _tokens(random: Random, median: float) -> int:
    return 1 + round(random.lognormvariate(math.log(median), SIGMA))

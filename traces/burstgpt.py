"""A trace in the form of BurstGPT's newer files: whole seconds, sessions of conversations, elapsed
times, failed requests without a response."""

from __future__ import annotations

import heapq
from pathlib import Path
from random import Random

from traces.draw import Lengths, gap

SEED, ROWS = 1, 500
RATE, CV = 0.6, 1.5
CONVERSATION = 0.5
"""Share of requests that are a turn of a conversation; the others came by the API."""
TURNS, THINK_S = 3.0, 60.0
FAILED = 1 - 4956.1 / 5344.0
GPT4 = 0.25
TOKENS_IN = Lengths(5, 450, 1600, 2000, 4000, 31_400)
TOKENS_OUT = Lengths(5, 240, 560, 750, 1500, 12_500)
BASE_S, TOKEN_S = 0.5, 0.02
HEADER = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
)


def write(path: Path) -> None:
    random = Random(SEED)
    lines: list[str] = []
    due: list[tuple[float, int]] = []
    """Next turns: when, of which session."""
    at, sessions = 0.0, 0
    while len(lines) < ROWS:
        at += gap(random, RATE / (1 + CONVERSATION * TURNS), CV)
        while due and due[0][0] < at:
            lines.append(_turn(random, due, *heapq.heappop(due)))
        if random.random() < CONVERSATION:
            sessions += 1
            lines.append(_turn(random, due, at, sessions))
        else:
            lines.append(_line(random, at, "", "API log")[0])
    path.write_text("\n".join([HEADER, *lines[:ROWS]]) + "\n")


def _turn(random: Random, due: list[tuple[float, int]], at: float, session: int) -> str:
    """A turn of a conversation; plans the one after it."""
    line, elapsed_s = _line(random, at, str(session), "Conversation log")
    if random.random() < 1 - 1 / TURNS:
        heapq.heappush(due, (at + elapsed_s + random.expovariate(1 / THINK_S), session))
    return line


def _line(random: Random, at: float, session: str, kind: str) -> tuple[str, float]:
    model = "GPT-4" if random.random() < GPT4 else "ChatGPT"
    tokens, output = TOKENS_IN(random), TOKENS_OUT(random)
    if random.random() < FAILED:
        output = 0
    elapsed_s = BASE_S + TOKEN_S * output
    cells = (int(at), session, f"{elapsed_s:.2f}", model, tokens, output, tokens + output, kind)
    return ",".join(map(str, cells)), elapsed_s

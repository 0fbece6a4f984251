"""Prompts as text: some conversations under one system prompt, some single questions."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from traces.draw import write_jsonl

SEED, CHATS, SINGLE = 1, 12, 12
WORDS = [
    "the", "a", "one", "this", "that", "of", "to", "in", "on", "with", "before", "after", "cache",
    "block", "token", "rank", "worker", "master", "queue", "batch", "step", "page", "prompt",
    "answer", "time", "load", "wait", "hold", "grant", "trace", "moves", "holds", "takes", "gives",
    "fills", "leaves", "comes", "ends", "starts", "counts", "why", "how", "when", "where", "which",
]  # fmt: skip
SYSTEM = " ".join(["You answer questions on a serving system, briefly and with its own words."] * 8)


def write(path: Path) -> None:
    random = Random(SEED)
    rows = [row for chat in range(CHATS) for row in _chat(random, chat)]
    rows += [
        {
            "timestamp": random.randrange(60_000),
            "prompt": _words(random, 10, 60),
            "max_tokens": random.randrange(8, 64),
        }
        for _ in range(SINGLE)
    ]
    write_jsonl(path, sorted(rows, key=lambda row: row["timestamp"]))


def _chat(random: Random, number: int) -> list[dict[str, Any]]:  # Any: what JSON holds
    prompt, at, rows = f"{SYSTEM}\n", random.randrange(40_000), []
    for _ in range(random.randrange(1, 4)):
        prompt += f"Question: {_words(random, 8, 40)}?\nAnswer: "
        answer = _words(random, 10, 30)
        rows.append(
            {"timestamp": at, "session": f"chat-{number}", "prompt": prompt, "output": answer}
        )
        prompt += f"{answer}.\n"
        at += random.randrange(3_000, 15_000)
    return rows


def _words(random: Random, least: int, most: int) -> str:
    return " ".join(random.choices(WORDS, k=random.randrange(least, most)))

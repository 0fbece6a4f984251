"""A trace in the form of WEKA's agentic coding sessions: prompts of many thousand tokens that grow
by what each step brought, thoughts between them, sub-agents."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from traces.draw import Lengths, write_jsonl

SEED, SESSIONS, REQUESTS = 1, 4, 10
BLOCK = 64
HEAD = 17_000
"""Tokens of tools and instructions before the first question."""
OPENING = Lengths(500, 12_000, 40_000, 60_000, 80_000, 100_000)
STEP = Lengths(50, 900, 4_000, 8_000, 20_000, 40_000)
"""Tokens that a step adds beside the answer before it."""
TOKENS_OUT = Lengths(20, 202, 966, 1616, 3966, 11_082)
THINK_S = Lengths(1, 8, 90, 200, 900, 3600)
TOKENS_PER_S = 60.0
MODEL = "model"


def write(path: Path) -> None:
    random = Random(SEED)
    write_jsonl(path, (_session(random, number) for number in range(SESSIONS)))


def _session(random: Random, number: int) -> dict[str, Any]:  # Any: what JSON holds
    blocks = count(1)
    requests = _agent(random, blocks, HEAD + OPENING(random), REQUESTS)
    if number % 2:
        before, behind = requests[4], requests[5]
        nested = _agent(random, blocks, HEAD // 2, 3)
        took = nested[-1]["t"] + nested[-1]["api_time"]
        launch = before["t"] + before["api_time"] + 1.0
        late = max(0.0, launch + took + 1.0 - behind["t"])
        for request in requests[5:]:
            request["t"] = round(request["t"] + late, 2)
        behind["think_time"] = round(behind["think_time"] + late, 2)
        marker = {"t": launch, "type": "subagent", "agent_id": "agent_001", "requests": nested}
        requests.insert(5, marker)
    return {
        "id": f"session_{number}",
        "models": [MODEL],
        "block_size": BLOCK,
        "hash_id_scope": "local",
        "tool_tokens": HEAD * 3 // 4,
        "system_tokens": HEAD // 4,
        "requests": requests,
    }


def _agent(random: Random, blocks: count[int], tokens: int, num: int) -> list[dict[str, Any]]:
    """Its requests; times from its own start."""
    ids: list[int] = []
    requests: list[dict[str, Any]] = []
    at = think_s = 0.0
    for _ in range(num):
        ids += [next(blocks) for _ in range(tokens // BLOCK - len(ids))]
        output = TOKENS_OUT(random)
        took = round(1.0 + output / TOKENS_PER_S, 2)
        requests.append(
            {
                "t": round(at, 2),
                "type": "n",
                "model": MODEL,
                "in": tokens,
                "out": output,
                "hash_ids": list(ids),
                "api_time": took,
                "think_time": think_s,
            }
        )
        think_s = float(THINK_S(random))
        at += took + think_s
        tokens += output + STEP(random)
    return requests

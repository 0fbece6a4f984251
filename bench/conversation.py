"""The Mooncake conversation trace as endless open-loop load: compressed to a rate, looped with ids
offset per loop.

A trace id names 512 tokens, so blocks have 512 tokens here: cutting each into 32 blocks of 16 would
only repeat every hash 32 times, and a prompt of 12,000 tokens would weigh 12 kB in an Ask. Each id
gets a random 128-bit hash; a loop XORs another random number into all of them, so that nothing of
an earlier loop matches. The trace's clock ticks every 3 s: arrivals of a tick are spread over its
3 s with a fixed seed. Ids that are always used together form a segment: what a simulated rank keeps
or evicts at once, so that a prompt of 24 blocks costs it a handful of table look-ups.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.report import ROOT
from rtp.core.types import HASH_BYTES

BLOCK = 512
GRID_S = 3.0
FILE = "mooncake_conversation_trace.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the trace."""

    at: float
    """Share of the loop's length, 0 to 1."""
    num_tokens: int
    output_tokens: int
    segments: tuple[int, ...]
    chat: int
    """The conversation it goes on with; its own number where it begins one."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the load."""

    number: int
    at: float
    """Seconds after the load's start."""
    turn: Turn
    chat: str
    keys: tuple[int, ...]
    """Its segments; equal keys are equal prefixes."""
    parts: tuple[bytes, ...]
    """Hashes of each segment's blocks, 16 bytes each."""


class Conversation:
    """The trace, read once. Raises FileNotFoundError where it is not."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        with gzip.open(path) as file:
            rows = [json.loads(line) for line in file]
        rng = np.random.default_rng(seed)
        ticks = np.array([row["timestamp"] for row in rows]) / 1000
        spread = np.sort(ticks + rng.uniform(0, GRID_S, len(ticks)))
        self.length_s = float(ticks[-1] + GRID_S)
        """Of a loop, in the trace's own time."""
        paths = [row["hash_ids"][: row["input_length"] // BLOCK] for row in rows]
        self._segment_of, self._blocks = _segments(paths)
        starts = np.cumsum([0, *map(len, self._blocks)]) * HASH_BYTES
        self._bounds = list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
        self._hashes = rng.integers(0, 2**64, (int(starts[-1]) // HASH_BYTES, 2), dtype=np.uint64)
        self._seed = seed
        chats = _chats(paths)
        self.turns = [
            Turn(
                at=float(at) / self.length_s,
                num_tokens=row["input_length"],
                output_tokens=row["output_length"],
                segments=self._cut(path),
                chat=chat,
            )
            for at, row, path, chat in zip(spread, rows, paths, chats, strict=True)
        ]

    @property
    def num_blocks(self) -> int:
        return len(self._hashes)

    def arrivals(self, rate: float) -> Iterator[Arrival]:
        """Endless, in order of time. Each is made when it is asked for, in about 3 us."""
        period = len(self.turns) / rate
        number = 0
        loop = 0
        while True:
            mask = np.random.default_rng((self._seed, loop)).integers(0, 2**64, 2, dtype=np.uint64)
            hashes = (self._hashes ^ mask).tobytes()
            first = loop * len(self._blocks)
            for turn in self.turns:
                yield Arrival(
                    number=number,
                    at=(loop + turn.at) * period,
                    turn=turn,
                    chat=f"{loop}-{turn.chat}",
                    keys=tuple([first + segment for segment in turn.segments]),
                    parts=tuple([hashes[slice(*self._bounds[s])] for s in turn.segments]),
                )
                number += 1
            loop += 1

    def _cut(self, path: list[int]) -> tuple[int, ...]:
        segments = []
        at = 0
        while at < len(path):
            segments.append(self._segment_of[path[at]])
            at += len(self._blocks[segments[-1]])
        return tuple(segments)


def find_trace() -> Path:
    """Where RTP_TRACES says, or beside the project. Ends the process where it is not."""
    path = Path(os.environ.get("RTP_TRACES", ROOT.parent / "shared" / "traces")) / FILE
    if not path.exists():
        raise SystemExit(f"{path} is not there; RTP_TRACES names the folder of traces")
    return path


def _segments(paths: list[list[int]]) -> tuple[dict[int, int], list[list[int]]]:
    """Id -> its segment; ids of each segment in order. No path ends or branches inside one."""
    parent: dict[int, int] = {}
    ends: set[int] = set()
    for path in paths:
        parent.update(zip(path[1:], path, strict=False))
        ends.update(path[-1:])
    children = Counter(parent.values())
    segment_of: dict[int, int] = {}
    blocks: list[list[int]] = []
    for path in paths:
        for block in path:
            if block in segment_of:
                continue
            above = parent.get(block)
            if above is None or children[above] > 1 or above in ends:
                blocks.append([])
            else:
                assert segment_of[above] == len(blocks) - 1, "new ids of a path follow each other"
            segment_of[block] = len(blocks) - 1
            blocks[-1].append(block)
    return segment_of, blocks


def _chats(paths: list[list[int]]) -> list[int]:
    """For each request the first of its conversation: the one whose whole prompt it begins with, if
    that is more than the block that all prompts begin with."""
    chat_at: dict[int, int] = {}
    chats = []
    for number, path in enumerate(paths):
        chat = next((chat_at[b] for b in reversed(path[1:]) if b in chat_at), number)
        chats.append(chat)
        if len(path) > 1:
            chat_at.setdefault(path[-1], chat)
    return chats

"""What a reader makes of a file, and the gathering of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from rtp.core.trace import TraceRow

SMALL_BLOCK = 16
"""Tokens of a block where a trace names none."""
MOST_TOKENS = 1 << 24
MOST_S = 400 * 86_400.0
"""Between a row and the file's first, and of a thought. A longer time is a slip of its unit or its
origin, and a replay would walk through all of it."""
MOST_ID = (1 << 63) - 1
FIRST_RENAMED = 1 << 48

T = TypeVar("T")
Size = Annotated[int, Meta(ge=1, le=MOST_TOKENS, description="Tokens of one block.")]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that is no request, and why. Lines count from 1; 0: the file as a whole."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """rows: by arrival, those of one instant in the file's order; the first arrives at 0."""

    rows: list[TraceRow]
    block_size: int
    bad: list[BadRow]
    num_blank: int
    name: str = ""
    format: str = ""
    num_renamed: int = 0
    """Blocks that had one number behind different prefixes, and got another."""


class Rows:
    """Takes a file's lines one by one; every line is told of once."""

    def __init__(self, units_per_s: float = 1.0) -> None:
        """units_per_s: of the times that add() is given, so that large ones lose nothing."""
        self.bad: list[BadRow] = []
        self.num_blank = 0
        self.line = 0
        """Of what is being taken; 0: the file as a whole."""
        self._units_per_s = units_per_s
        self._times: list[float] = []
        self._rows: list[TraceRow] = []

    def header(self, lines: Iterable[tuple[int, bytes]]) -> bytes:
        """The first line that is not blank; b"" where there is none."""
        for self.line, text in lines:
            if text:
                return text
            self.num_blank += 1
        return b""

    def take_all(self, lines: Iterable[tuple[int, T]], take: Callable[[T], object]) -> None:
        """take: adds the rows of a line that is not blank; raises ValueError, DecodeError or, where
        it is nested too deep, RecursionError with the reason where it cannot."""
        for self.line, line in lines:
            if not line:
                self.num_blank += 1
                continue
            try:
                take(line)
            except (ValueError, RecursionError, msgspec.DecodeError) as error:
                self.reject(str(error))
        self.line = 0

    def reject(self, reason: str) -> None:
        """Of the line that is being taken."""
        self.bad.append(BadRow(self.line, reason))

    def add(
        self,
        at: float,
        num_tokens: int,
        num_output: int,
        blocks: Callable[[], Sequence[int]],
        *,
        session: int = -1,
        after: int = -1,
        think_s: float = 0.0,
        tenant: str = "",
    ) -> int:
        """A row; its number among those added, for `after` of later ones. Raises ValueError with
        the reason where it can be no request.

        blocks: gives the prompt's numbers; not asked where anything else is wrong, so that a row
        that is none uses no number.
        """
        if not isfinite(at) or at < 0:
            raise ValueError(f"time {at:g} is none of a trace")
        first = self._times[0] if self._times else at
        if abs(at - first) > MOST_S * self._units_per_s:
            apart_s = abs(at - first) / self._units_per_s
            raise ValueError(f"{apart_s:g} s from the first row are more than {MOST_S:g}")
        if after >= 0 and at < self._times[after]:
            raise ValueError("waits for a row that comes after it")
        duration(think_s, "think time")
        if num_tokens < 1 or num_output < 1:
            raise ValueError(f"{num_tokens} tokens in, {num_output} out: at least 1 of each")
        if max(num_tokens, num_output) > MOST_TOKENS:
            raise ValueError(f"{max(num_tokens, num_output)} tokens are more than {MOST_TOKENS}")
        block_ids = tuple(blocks())
        self._times.append(at)
        self._rows.append(
            TraceRow(0.0, num_tokens, num_output, block_ids, session, after, think_s, tenant)
        )
        return len(self._rows) - 1

    def trace(self, path: Path, format: str, block_size: int, num_renamed: int = 0) -> Trace:
        """All rows by arrival; what a row waits for is found where it then stands."""
        order = sorted(range(len(self._rows)), key=self._times.__getitem__)
        place = {index: new for new, index in enumerate(order)}
        first = self._times[order[0]] if order else 0.0
        rows = [
            replace(
                self._rows[index],
                arrival_s=(self._times[index] - first) / self._units_per_s,
                after=place.get(self._rows[index].after, -1),
            )
            for index in order
        ]
        name = Path(path.name.removesuffix(".gz")).stem
        bad = sorted(self.bad, key=attrgetter("line"))
        return Trace(rows, block_size, bad, self.num_blank, name, format, num_renamed)


class OwnBlocks:
    """Numbers for prompts of which nothing is known to be shared."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._next = 0

    def of(self, num_tokens: int) -> range:
        """Of one prompt, the last perhaps of a partly filled block; never given again."""
        first, self._next = self._next, self._next + max(0, -(-num_tokens // self._size))
        return range(first, self._next)


class Chains:
    """Numbers made to mean whole prefixes: one that comes behind another prefix gets a new number.

    What is a chain already keeps its numbers.
    """

    def __init__(self) -> None:
        self._number: dict[tuple[int, int], int] = {}
        self._taken: set[int] = set()
        self._fresh = count(FIRST_RENAMED)
        self.num_renamed = 0

    def of(self, block_ids: Sequence[int]) -> list[int]:
        """Raises ValueError for a number that is out of range."""
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) <= MOST_ID:
            wrong = min(block_ids) if min(block_ids) < 0 else max(block_ids)
            raise ValueError(f"hash id {wrong} is not within 0 and {MOST_ID}")
        out, parent = [], -1
        for block in block_ids:
            number = self._number.get((parent, block))
            if number is None:
                number = self._number[parent, block] = self._new(block)
            out.append(number)
            parent = number
        return out

    def _new(self, block: int) -> int:
        if block in self._taken:
            self.num_renamed += 1
            block = next(number for number in self._fresh if number not in self._taken)
        self._taken.add(block)
        return block


def fitting(
    block_ids: Sequence[int], num_tokens: int, block_size: int, whole_alone: bool = False
) -> Sequence[int]:
    """The same, one for each block of the prompt. Raises ValueError where they are more or less.

    whole_alone: a partly filled last block may have none.
    """
    blocks = -(-num_tokens // block_size)
    if len(block_ids) != blocks and not (
        whole_alone and len(block_ids) == num_tokens // block_size
    ):
        raise ValueError(f"{len(block_ids)} block ids for {num_tokens} tokens, which are {blocks}")
    return block_ids


def duration(seconds: float, name: str) -> float:
    """The same. Raises ValueError for what is no length of time, or of none within a trace."""
    if not 0.0 <= seconds <= MOST_S:
        raise ValueError(f"{name} {seconds:g} s is not within 0 and {MOST_S:g}")
    return seconds

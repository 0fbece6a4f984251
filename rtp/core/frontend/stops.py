"""Stop strings as one automaton: text is read once, character by character, whatever the number of
stops and however the text is cut into pieces.

The state after some text is its longest suffix that begins a stop. Its length is exactly what must
be held back: anything shorter might leak part of a stop, anything longer delays ordinary text.
Source: Aho and Corasick, Efficient string matching, CACM 18(6), 1975.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Scan(NamedTuple):
    """Where a scan left off."""

    state: int
    end: int
    """Characters of the scanned piece up to the end of the first complete stop; -1: none."""
    stop: str
    """That stop, or ''. Of stops that end together the longest, which starts first, counts."""


class StopStrings:
    """The stops of one request, shared by its choices. State 0 is the start of a text."""

    __slots__ = ("_depth", "_fail", "_first", "_next", "_stop")

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings.  Cost: O(their total length)."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop = [""]
        for stop in stops:
            self._insert(stop)
        self._fail = self._failures()
        self._first = frozenset(self._next[0])

    def held(self, state: int) -> int:
        """Characters at the end of the text that may still become a stop."""
        return self._depth[state]

    def scan(self, state: int, piece: str, armed: bool = True) -> Scan:
        """Reads a piece of text; stops at the first complete stop, if `armed`.

        Cost: amortised O(1) per character; a piece without a stop's first character is skipped.
        """
        if state == 0 and self._first.isdisjoint(piece):
            return Scan(0, -1, "")
        for index, char in enumerate(piece):
            while state and char not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(char, 0)
            if armed and self._stop[state]:
                return Scan(state, index + 1, self._stop[state])
            while state and not self._next[state]:  # a whole stop, not armed: it cannot grow
                state = self._fail[state]
        return Scan(state, -1, "")

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop.append("")
            state = self._next[state][char]
        self._stop[state] = stop

    def _failures(self) -> list[int]:
        """Per state, that of its longest proper suffix; complete stops spread along it."""
        fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._stop[state] = self._stop[state] or self._stop[fail[state]]
            for char, child in self._next[state].items():
                back = fail[state]
                while back and char not in self._next[back]:
                    back = fail[back]
                fail[child] = self._next[back].get(char, 0)
                queue.append(child)
        return fail

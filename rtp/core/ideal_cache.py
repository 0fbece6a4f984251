"""How much of a trace's prompts a cache would find: a plain walk over its rows, no cluster.

Rows are taken one after the other in their order, each finished before the next; with several
caches, row i goes to cache i modulo their number (round robin). Two rules:

- *engine*: what the workers do. Only whole blocks are kept, and the last token of a prompt is
  always computed, so at most `num_tokens - 1` are found, rounded down to a block.
- *partial*: what papers count. A partly filled last block is kept and found like any other.

A cache of finite size works as the workers' (core/worker/blocks): a prompt holds all its blocks
while it runs, free blocks are used first, then the least recently used; it gives its blocks back
tail first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rtp.core.trace import TraceRow


@dataclass(frozen=True, slots=True)
class Found:
    """Sums over all rows."""

    tokens: int
    found_tokens: int
    blocks: int
    found_blocks: int
    num_too_long: int
    """Rows with more blocks than a cache has; they find and leave nothing."""

    @property
    def token_share(self) -> float:
        return self.found_tokens / max(1, self.tokens)

    @property
    def block_share(self) -> float:
        return self.found_blocks / max(1, self.blocks)


def found(
    rows: Sequence[TraceRow],
    block_size: int,
    *,
    partial: bool = False,
    caches: int = 1,
    num_blocks: int | None = None,
) -> Found:
    """partial: the rule.  num_blocks: of each cache; None: no end.

    Cost: the new blocks and a logarithm of the others of each row for caches without an end, all
    blocks of each row for others.
    """
    walks: list[_Endless | _Lru] = [
        _Endless() if num_blocks is None else _Lru(num_blocks) for _ in range(caches)
    ]
    tokens = found_tokens = blocks = found_blocks = num_too_long = 0
    for index, row in enumerate(rows):
        held = -(-row.num_tokens // block_size)
        ids = row.block_ids if partial else row.block_ids[: row.num_tokens // block_size]
        most = held if partial else (row.num_tokens - 1) // block_size
        matched = walks[index % caches].take(ids, most, held)
        tokens += row.num_tokens
        blocks += held
        if matched is None:
            num_too_long += 1
        else:
            found_blocks += matched
            found_tokens += min(matched * block_size, row.num_tokens)
    return Found(tokens, found_tokens, blocks, found_blocks, num_too_long)


class _Endless:
    """A cache that never forgets. It is closed under prefixes, so the match is bisected."""

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def take(self, ids: Sequence[int], most: int, held: int) -> int:
        """Blocks found, of at most so many; then all `ids` are there."""
        matched = bisect_left(ids, True, key=lambda block: block not in self._ids)
        self._ids.update(ids[matched:])
        return min(matched, most)


class _Lru:
    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._ids: OrderedDict[int, None] = OrderedDict()
        """Of no running prompt, the least recently used first."""

    def take(self, ids: Sequence[int], most: int, held: int) -> int | None:
        """The same for a prompt of `held` blocks; None where they are too many."""
        if held > self._num_blocks:
            return None
        matched = 0
        for block in ids[:most]:
            if block not in self._ids:
                break
            del self._ids[block]
            matched += 1
        while len(self._ids) + held > self._num_blocks:
            self._ids.popitem(last=False)
        for block in reversed(ids):
            self._ids[block] = None
            self._ids.move_to_end(block)
        return matched

"""Blocks, holders and prompts for comparing prefix indexes: the same for every index that is fed.

A million distinct blocks: conversations of three lengths, each behind one of a few system prompts
that every rank holds (or none); one to eight ranks hold a prefix of a conversation, on device or
host, tails leaving first. Of the prompts, half are known to the end, half part from what is known
at a random block. Needs the standard library only, for it also runs where rtp is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

HEAD = 16
"""Blocks of a system prompt."""
LENGTHS = ((48, 0.4), (384, 0.3), (2200, 0.3))
"""Blocks of a conversation, and the share of all blocks that lie in such."""
OWNERS, OWNER_WEIGHTS = (1, 2, 4, 8), (8, 6, 4, 2)
SHARE_ALL_ON_DEVICE = 0.7


@dataclass(frozen=True)
class Holding:
    """What one rank has of a conversation: its first blocks, on device and on device or host."""

    rank: int
    device: int
    held: int


@dataclass(frozen=True)
class Conversation:
    head: list[int]
    """Blocks that every rank holds."""
    keys: list[int]
    """Those behind them."""
    holdings: list[Holding]


class Load:
    """Everything follows from the seed."""

    def __init__(self, blocks: int, ranks: int, seed: int, heads: int) -> None:
        self.ranks = ranks
        source = Random(seed)
        self.heads = [[source.getrandbits(64) for _ in range(HEAD)] for _ in range(heads)]
        self.conversations: list[Conversation] = []
        for length, share in LENGTHS:
            for _ in range(round(share * blocks / length)):
                keys = [source.getrandbits(64) for _ in range(length)]
                head = source.choice(self.heads) if heads else []
                self.conversations.append(Conversation(head, keys, self._holders(source, length)))
        source.shuffle(self.conversations)

    def _holders(self, source: Random, length: int) -> list[Holding]:
        number = min(source.choices(OWNERS, OWNER_WEIGHTS)[0], self.ranks)
        holdings = []
        for index, rank in enumerate(source.sample(range(self.ranks), number)):
            held = length if index == 0 else source.randint(1, length)
            on_device = source.random() < SHARE_ALL_ON_DEVICE
            holdings.append(Holding(rank, held if on_device else source.randint(0, held), held))
        return holdings

    @property
    def num_blocks(self) -> int:
        return len(self.heads) * HEAD + sum(len(c.keys) for c in self.conversations)

    def prompts(self, length: int, count: int, seed: int) -> list[list[int]]:
        """Each `length` keys, its head included."""
        source = Random(f"prompts {seed}")
        long = [c for c in self.conversations if len(c.head) + len(c.keys) >= length]
        prompts = []
        for number in range(count):
            conversation = source.choice(long)
            keys = (conversation.head + conversation.keys)[:length]
            if number % 2:
                known = source.randrange(length)
                keys[known:] = [source.getrandbits(64) for _ in range(length - known)]
            prompts.append(keys)
        return prompts

    def ends(self, count: int, seed: int) -> Iterator[tuple[int, int, int]]:
        """(rank, key of the last block it holds, a new key behind it), for single-block events."""
        source = Random(f"ends {seed}")
        for conversation in source.sample(self.conversations, count):
            holding = conversation.holdings[0]
            yield holding.rank, conversation.keys[holding.held - 1], source.getrandbits(64)

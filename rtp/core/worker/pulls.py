"""Pages that a sequence gets from another worker before its first step here.

A transfer writes into pages beside the order of steps, so it has them to itself: it begins when the
steps in flight at its birth have come back, and keeps a use of its own on the pages until its end,
whatever becomes of the sequence meanwhile. Only whole blocks travel; what is left of the prompt is
computed like the end of any prefix found in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rtp.core.commands import Pull
from rtp.core.messages import Source
from rtp.core.steps import Received
from rtp.core.types import Ids
from rtp.core.worker.blocks import BlockManager
from rtp.core.worker.sequence import Sequence, int32s
from rtp.core.worker.stats import Stats

PULL_TIMEOUT_S = 5.0
"""Less than the source keeps the pages (attempts.HANDOVER_S)."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One pull. Tokens start .. end - 1 come into pages[num_held:]."""

    number: int
    sequence: Sequence
    source: Source
    num_held: int
    """Blocks that were here."""
    start: int
    end: int
    ids: Ids
    """Tokens 0 .. end - 1."""
    pages: tuple[int, ...]
    """Of all tokens before `end`, also of those blocks."""
    after_step: int
    """Steps before it may still touch the pages."""

    @property
    def wanted(self) -> bool:
        """Its sequence still waits for it."""
        return self.sequence.pull == self.number and not self.sequence.ended

    @property
    def new_pages(self) -> bytes:
        """int32: those that it fills."""
        return int32s(self.pages[self.num_held :]).tobytes()

    def command(self, rank: int) -> Pull:
        return Pull(
            rank=rank,
            number=self.number,
            source=self.source,
            start=self.start,
            pages=self.new_pages,
            num_tokens=self.end - self.start,
            timeout_s=PULL_TIMEOUT_S,
        )


class Pulls:
    """Transfers into one rank's pages, until their end is told."""

    __slots__ = ("_blocks", "_count", "_open", "_received", "_stats", "_unsent")

    def __init__(self, blocks: BlockManager, stats: Stats) -> None:
        self._blocks = blocks
        self._stats = stats
        self._count = 0
        self._open: dict[int, Transfer] = {}
        self._unsent: deque[Transfer] = deque()
        self._received: list[Received] = []

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def begin(self, seq: Sequence, num_held: int, next_step: int) -> bool:
        """Whether a sequence that was just started, with so many blocks found here, waits for a
        transfer of more. Its pages are used by nobody else yet."""
        if seq.source is None:
            return False
        size = self._blocks.block_size
        num_blocks = min(seq.source.num_tokens // size, seq.reusable(size))
        if num_blocks <= num_held:
            return False
        pages = tuple(seq.pages[:num_blocks])
        self._blocks.acquire(pages)
        seq.pull = self._count
        transfer = Transfer(
            number=self._count,
            sequence=seq,
            source=seq.source,
            num_held=num_held,
            start=num_held * size,
            end=num_blocks * size,
            ids=seq.ids[: num_blocks * size].tobytes(),
            pages=pages,
            after_step=next_step,
        )
        self._count += 1
        self._open[transfer.number] = transfer
        self._unsent.append(transfer)
        return True

    def take_ready(self, oldest_step: int) -> list[Transfer]:
        """Those that may begin now; each is told once. What nobody waits for never begins."""
        ready = []
        while self._unsent and self._unsent[0].after_step <= oldest_step:
            transfer = self._unsent.popleft()
            if transfer.wanted:
                ready.append(transfer)
            else:
                self.release(transfer)
        self._stats.pulls += len(ready)
        return ready

    def get(self, number: int) -> Transfer:
        return self._open[number]

    def filled(self, transfer: Transfer) -> None:
        """All its tokens came; the next plan tells the Runner."""
        self._stats.pulled_tokens += transfer.end - transfer.start
        self._received.append(Received(transfer.start, transfer.ids, transfer.new_pages))

    def release(self, transfer: Transfer) -> None:
        """It is over, or never began."""
        del self._open[transfer.number]
        self._blocks.release(transfer.pages)

    def take_received(self) -> tuple[Received, ...]:
        """What came since the last plan."""
        received, self._received = tuple(self._received), []
        return received

    def pages(self) -> Iterator[int]:
        """Every use that transfers hold."""
        for transfer in self._open.values():
            yield from transfer.pages

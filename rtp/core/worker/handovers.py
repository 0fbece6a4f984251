"""Pages of choices that were handed to another worker, kept here until it has them.

A choice's whole blocks are pinned when it ends with "handover", under a ticket that only the worker
it was handed to may use. The pin ends with its attempt: when the frontend says that the other
worker is under way, when the frontend is gone, or when the lease is over. It ends before where a
rank has nothing to run and, for its pins, no room to start what waits: that may be a further choice
of the very request. What was pinned is then computed by the other worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b

from rtp.core.messages import Register, Source
from rtp.core.worker.rank import Rank
from rtp.core.worker.sequence import Sequence
from rtp.core.worker.streams import Attempt

TICKET_BYTES = 16


class HandOvers:
    """One pin per ticket; each belongs to an attempt."""

    __slots__ = ("_card", "_key", "_pins", "_ranks")

    def __init__(self, card: Register, ranks: SequenceOf[Rank], key: bytes) -> None:
        """key: secret of this life of the worker."""
        self._card = card
        self._ranks = ranks
        self._key = key
        self._pins: dict[bytes, tuple[int, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def keep(self, attempt: Attempt, seq: Sequence) -> Source:
        """Pins the blocks of a sequence that has just ended: nobody else has got them yet."""
        pages = list(seq.pages[: seq.registered])
        rank = self._ranks[attempt.rank]
        rank.batcher.blocks.acquire(pages)
        ticket = self._ticket(attempt, seq.choice)
        self._pins[ticket] = attempt.rank, pages
        attempt.tickets.append(ticket)
        return Source(
            worker_id=self._card.worker_id,
            epoch=self._card.epoch,
            address=self._card.address,
            rank=attempt.rank,
            ticket=ticket,
            num_tokens=len(pages) * rank.capacity.block_size,
        )

    def holds(self, ticket: bytes, rank: int) -> bool:
        """Whether the pages of a ticket can be read now."""
        pin = self._pins.get(ticket)
        return pin is not None and pin[0] == rank and not self._ranks[rank].failed

    def release(self, attempt: Attempt) -> None:
        """The attempt is over here."""
        for ticket in attempt.tickets:
            self._unpin(ticket)
        attempt.tickets.clear()

    def make_way(self, rank: int) -> bool:
        """Ends the oldest pin on a rank; False where it has none."""
        for ticket, (where, _) in self._pins.items():
            if where == rank:
                self._unpin(ticket)
                return True
        return False

    def pages(self, rank: int) -> Iterator[int]:
        """Every use that pins hold on a rank's pages."""
        for where, pages in self._pins.values():
            if where == rank:
                yield from pages

    def check(self, attempts: Iterable[Attempt]) -> None:
        """Raises AssertionError unless every pin belongs to one attempt."""
        tickets = [ticket for attempt in attempts for ticket in attempt.tickets]
        assert len(set(tickets)) == len(tickets)
        assert self._pins.keys() <= set(tickets)

    def _unpin(self, ticket: bytes) -> None:
        pin = self._pins.pop(ticket, None)
        if pin is not None:
            rank, pages = pin
            self._ranks[rank].batcher.blocks.release(pages)

    def _ticket(self, attempt: Attempt, choice: int) -> bytes:
        to = attempt.handover
        assert to is not None
        what = (attempt.request_id, attempt.attempt, choice, to.worker_id, to.epoch)
        return blake2b(repr(what).encode(), key=self._key, digest_size=TICKET_BYTES).digest()

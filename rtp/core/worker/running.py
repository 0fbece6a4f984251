"""The sequences of a rank that hold pages: start, growth, stop, and the blocks they compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sortedcontainers import SortedDict

from rtp.core.worker.blocks import BlockManager
from rtp.core.worker.sequence import Sequence


class Running:
    """Ordered by arrival, oldest first. A prompt's blocks that are not findable yet belong to the
    one sequence that computes them; others that need them wait for it."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self._block_size = blocks.block_size
        self._by_arrival: SortedDict[int, Sequence] = SortedDict()
        self._computing: dict[bytes, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.arrival in self._by_arrival

    def __iter__(self) -> Iterator[Sequence]:
        """Over the sequences of this moment; starting and stopping meanwhile is fine."""
        return iter(list(self._by_arrival.values()))

    def in_the_making(self, key: bytes | None) -> bool:
        """Whether one of them is computing this block right now."""
        return key in self._computing

    def has_room_for(self, seq: Sequence, held: list[int]) -> bool:
        """Pages for all its known tokens and, beside others, some growth of everyone: the more the
        more often it was preempted, so that it does not come back only to be preempted again."""
        need = self.pages_for(len(seq.ids)) - len(held)
        room = self.blocks.num_available_beside(held) - need
        if room < 0 or not len(self):
            return room >= 0
        ahead = self._block_size * 8**seq.preemptions
        return sum(self._growth(each, ahead) for each in (seq, *self)) <= room

    def start(self, seq: Sequence, held: list[int]) -> None:
        """Gives it these blocks and fresh ones for all known tokens; there must be room."""
        self._by_arrival[seq.arrival] = seq
        self.blocks.acquire(held)
        fresh = self.blocks.allocate(self.pages_for(len(seq.ids)) - len(held))
        assert fresh is not None, "room was not checked"
        seq.begin(held + fresh, len(held), self._block_size)
        for key in seq.keys[seq.registered :]:
            self._computing.setdefault(key, seq)

    def stop(self, seq: Sequence) -> None:
        """Takes its pages away."""
        del self._by_arrival[seq.arrival]
        self.blocks.release(seq.pages)
        for key in seq.keys[seq.registered :]:
            if self._computing.get(key) is seq:
                del self._computing[key]

    def grow(self, seq: Sequence) -> bool:
        """A page for its next token, if it needs one; False where there is none."""
        if self.pages_for(seq.scheduled + 1) <= len(seq.pages):
            return True
        page = self.blocks.allocate(1)
        if page is None:
            return False
        seq.pages.extend(page)
        return True

    def cheapest(self) -> Sequence:
        """Whom to preempt: who has the fewest tokens to recompute, then who came last; never the
        oldest. Pages shared with others are not lost, but neither are they won."""

        def cost(seq: Sequence) -> tuple[bool, int, int]:
            exclusive = self.blocks.num_exclusive(seq.pages)
            return exclusive == 0, min(exclusive * self._block_size, seq.scheduled), -seq.arrival

        return min(list(self)[1:], key=cost)

    def register(self, seq: Sequence) -> None:
        """Makes its computed whole blocks findable; equal ones already there replace its own."""
        seq.extend_keys(self._block_size)
        for index in range(seq.registered, seq.computed // self._block_size):
            key = seq.keys[index]
            seq.pages[index] = self.blocks.register(seq.pages[index], key)
            if self._computing.get(key) is seq:
                del self._computing[key]
            seq.registered = index + 1

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def check(self, kept: Iterable[int] = ()) -> None:
        """Raises AssertionError unless pages, counters and owners of blocks agree. kept: pages that
        are held beside the sequences', one entry per use."""
        self.blocks.check()
        users = [0] * self.blocks.num_blocks
        for page in kept:
            users[page] += 1
        for seq in self:
            assert not seq.ended
            assert seq.handle >= 0
            assert seq.computed <= seq.scheduled <= seq.length
            assert self.pages_for(seq.scheduled) <= len(seq.pages)
            for page in seq.pages:
                users[page] += 1
        assert users == self.blocks.users(), "user counts differ from the page tables"
        assert all(seq in self for seq in self._computing.values())

    def _growth(self, seq: Sequence, ahead: int) -> int:
        """Pages that its next `ahead` tokens need beyond those of its tokens now."""
        end = min(seq.length + ahead, seq.num_prompt + seq.until)
        have = max(len(seq.pages), self.pages_for(seq.length))
        return max(0, self.pages_for(end) - have)

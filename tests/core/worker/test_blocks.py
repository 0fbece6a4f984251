"""BlockManager against a naive oracle, and its corners."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rtp.core.worker.blocks import BlockManager

NUM_BLOCKS = 7


def keys_of(path: tuple[int, ...]) -> list[bytes]:
    """One key per prefix of the path, so that keys name whole prefixes as real hashes do."""
    return [bytes(path[: end + 1]).ljust(16, b"\xff") for end in range(len(path))]


class Oracle(RuleBasedStateMachine):
    """Sequences come, compute their blocks one by one and go; the model is lists and sets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, 4)
        self.users = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.key: dict[int, bytes] = {}
        self.lru: list[int] = []
        self.sequences: list[tuple[list[int], list[bytes], int]] = []
        self.view: set[bytes] = set()

    def _acquire(self, ids: list[int]) -> None:
        for block in ids:
            self.users[block] += 1
            if block in self.lru:
                self.lru.remove(block)

    def _release(self, ids: list[int]) -> None:
        for block in reversed(ids):
            self.users[block] -= 1
            if self.users[block] == 0 and block in self.key:
                self.lru.append(block)

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple))
    def start(self, path: tuple[int, ...]) -> None:
        keys = keys_of(path)
        by_key = {key: block for block, key in self.key.items()}
        want = []
        for key in keys:
            if key not in by_key:
                break
            want.append(by_key[key])
        held = self.blocks.match(keys)
        assert held == want
        room = self.blocks.num_available_beside(held)
        self.blocks.acquire(held)
        self._acquire(held)
        assert room == self.blocks.num_available
        need = len(keys) - len(held)
        fresh = self.blocks.allocate(need)
        available = sum(users == 0 for users in self.users.values())
        if need > available:
            assert fresh is None
            self.blocks.release(held)
            self._release(held)
            return
        assert fresh is not None
        num_free = available - len(self.lru)
        for block in fresh[num_free:]:
            assert block == self.lru.pop(0), "not the least recently used one left"
            del self.key[block]
        assert not set(fresh[:num_free]) & set(self.key)
        self._acquire(fresh)
        self.sequences.append((held + fresh, keys, len(held)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        ids, keys, done = self.sequences[index]
        for block in range(done, data.draw(st.integers(done, len(ids)))):
            self._compute(ids, keys, block)
            self.sequences[index] = (ids, keys, block + 1)

    def _compute(self, ids: list[int], keys: list[bytes], done: int) -> None:
        by_key = {key: block for block, key in self.key.items()}
        stands = self.blocks.register(ids[done], keys[done])
        assert stands == by_key.get(keys[done], ids[done])
        if stands != ids[done]:
            self._acquire([stands])
            self._release([ids[done]])
            ids[done] = stands
        self.key[stands] = keys[done]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ids, _, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        exclusive = sum(self.users[block] == 1 for block in ids)
        assert self.blocks.num_exclusive(ids) == exclusive
        self.blocks.release(ids)
        self._release(ids)

    @rule()
    def clear(self) -> None:
        self.blocks.clear()
        for block in self.lru:
            del self.key[block]
        self.lru.clear()

    @rule()
    def report(self) -> None:
        added, removed = self.blocks.take_changes()
        assert not self.view & set(added)
        assert self.view >= set(removed)
        self.view = self.view - set(removed) | set(added)
        assert self.view == set(self.key.values())

    @invariant()
    def agrees(self) -> None:
        self.blocks.check()
        assert self.blocks.users() == list(self.users.values())
        assert set(self.blocks.keys()) == set(self.key.values())
        assert self.blocks.num_cached == len(self.lru)
        assert self.blocks.num_changes <= 2 * NUM_BLOCKS

    @invariant()
    def prefix_closed(self) -> None:
        paths = {key.rstrip(b"\xff") for key in self.key.values()}
        assert all(path[:-1] in paths for path in paths if len(path) > 1)


TestOracle = Oracle.TestCase
TestOracle.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_f01_keys_are_compared_in_all_their_128_bits():
    """Keys that differ in one bit only, wherever it is, are different blocks."""
    blocks = BlockManager(129, 4)
    base = bytes(16)
    ids = blocks.allocate(129)
    assert ids is not None
    keys = [base] + [(1 << bit).to_bytes(16, "big") for bit in range(128)]
    for block, key in zip(ids, keys, strict=True):
        assert blocks.register(block, key) == block
    assert [blocks.match([key]) for key in keys] == [[block] for block in ids]


def test_a_key_that_comes_and_goes_within_a_period_is_not_reported():
    blocks = BlockManager(1, 4)
    (block,) = blocks.allocate(1) or []
    blocks.register(block, b"a" * 16)
    blocks.release([block])
    blocks.clear()
    assert blocks.take_changes() == ([], [])


def test_a_key_that_goes_and_comes_back_within_a_period_is_not_reported():
    blocks = BlockManager(1, 4)
    for expected in (([b"a" * 16], []), ([], [])):
        (block,) = blocks.allocate(1) or []
        blocks.register(block, b"a" * 16)
        blocks.release([block])
        assert blocks.take_changes() == expected

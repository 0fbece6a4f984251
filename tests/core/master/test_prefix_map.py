"""The prefix map against an oracle of plain sets, and the cases of the cache view it settles."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rtp.core.hashing import block_hashes, namespace
from rtp.core.master.owner_sets import USED
from rtp.core.master.prefix_map import PrefixMap
from rtp.core.types import HASH_BYTES, Tier, pack_ids
from tests.support.keys import low64


def named(keys: Sequence[int]) -> bytes:
    """Hashes of which these are the keys."""
    return b"".join(bytes(8) + key.to_bytes(8, sys.byteorder) for key in keys)


RANKS = 3
MAX_BLOCKS = 24
PROMPTS = [
    [(head << 60) + (tail << 56) + 10 * tail + i if i >= 3 else (head << 60) + i for i in range(24)]
    for head, tail in ((0, 0), (0, 1), (1, 0))
]
"""Three prompts of 24 keys; the first two share their first three blocks."""

prompts = st.sampled_from(PROMPTS)
ranks = st.integers(0, RANKS - 1)
tiers = st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.STORE])
spans = st.one_of(st.tuples(st.integers(0, 23), st.integers(0, 24)).map(sorted), st.just([0, 24]))


class Oracle:
    """What the map must answer, from plain sets and counters."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.held: set[tuple[int, int, int]] = set()  # (rank, key, plane)
        self.pending: Counter[tuple[int, int]] = Counter()
        self.confirmed: Counter[tuple[int, int]] = Counter()

    def has(self, rank: int, key: int, plane: int) -> bool:
        return (rank, key, plane) in self.held or (plane == 0 and self.pending[rank, key] > 0)

    def fits(self, key: int) -> bool:
        keys = {k for _, k, _ in self.held} | {k for (_, k), n in self.pending.items() if n}
        return key in keys or len(keys) < self.max_blocks

    def add(self, rank: int, keys: list[int], plane: int) -> None:
        for key in keys:
            if plane == 0:
                self.confirmed[rank, key] += self.pending[rank, key]
                was_pending = self.pending.pop((rank, key), 0)
                if was_pending:
                    self.held.add((rank, key, 0))
                    continue
            if self.fits(key):
                self.held.add((rank, key, plane))

    def remove(self, rank: int, keys: list[int], plane: int) -> None:
        self.held -= {(rank, key, plane) for key in keys}

    def arrive(self, rank: int, keys: list[int]) -> None:
        for key in keys:
            if (rank, key, 0) in self.held:
                self.confirmed[rank, key] += 1
            elif self.fits(key):
                self.pending[rank, key] += 1

    def settle(self, rank: int, keys: list[int]) -> None:
        for key in keys:
            if self.confirmed[rank, key]:
                self.confirmed[rank, key] -= 1
            elif self.pending[rank, key]:
                self.pending[rank, key] -= 1

    def clear(self, rank: int) -> None:
        self.held = {entry for entry in self.held if entry[0] != rank}

    def drop(self, rank: int) -> None:
        self.clear(rank)
        for counts in (self.pending, self.confirmed):
            for entry in [entry for entry in counts if entry[0] == rank]:
                del counts[entry]

    def depth(self, keys: list[int], rank: int, planes: tuple[int, ...]) -> int:
        for depth, key in enumerate(keys):
            if not any(self.has(rank, key, plane) for plane in planes):
                return depth
        return len(keys)

    def best(self, keys: list[int]) -> int:
        for depth, key in enumerate(keys):
            if not any(self.has(r, key, p) for r in range(RANKS) for p in range(3)):
                return depth
        return len(keys)


class MapMachine(RuleBasedStateMachine):
    """Holdings with holes, arrivals, ranks that come and go, sweeps at any moment (case X11)."""

    max_blocks = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.map = PrefixMap(RANKS, max_blocks=self.max_blocks)
        self.oracle = Oracle(self.max_blocks)
        self.under_way: list[tuple[int, list[int]]] = []

    @rule(rank=ranks, prompt=prompts, span=spans, tier=tiers)
    def add(self, rank: int, prompt: list[int], span: list[int], tier: Tier) -> None:
        keys = prompt[span[0] : span[1]]
        self.map.add(rank, named(keys), tier)
        self.oracle.add(rank, keys, min(tier, 2))

    @rule(rank=ranks, prompt=prompts, span=spans, tier=tiers)
    def remove(self, rank: int, prompt: list[int], span: list[int], tier: Tier) -> None:
        keys = prompt[span[0] : span[1]]
        self.map.remove(rank, named(keys), tier)
        self.oracle.remove(rank, keys, min(tier, 2))

    @rule(rank=ranks, prompt=prompts, end=st.integers(0, 24))
    def arrive(self, rank: int, prompt: list[int], end: int) -> None:
        self.map.arrive(rank, named(prompt[:end]))
        self.oracle.arrive(rank, prompt[:end])
        self.under_way.append((rank, prompt[:end]))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.under_way) - 1))
        rank, keys = self.under_way.pop(index)
        self.map.settle(rank, named(keys))
        self.oracle.settle(rank, keys)

    @rule(rank=ranks)
    def clear_rank(self, rank: int) -> None:
        self.map.clear_rank(rank)
        self.oracle.clear(rank)

    @rule(rank=ranks)
    def drop_rank(self, rank: int) -> None:
        self.map.drop_rank(rank)
        self.oracle.drop(rank)
        self.under_way = [entry for entry in self.under_way if entry[0] != rank]

    @rule(budget=st.integers(1, 400))
    def sweep(self, budget: int) -> None:
        self.map.sweep(budget)

    @invariant()
    def answers_like_the_oracle(self) -> None:
        self.map.check()
        for keys in PROMPTS:
            match = self.map.match(named(keys))
            for rank in range(RANKS):
                assert match.device[rank] == self.oracle.depth(keys, rank, (0,))
                assert match.host[rank] == self.oracle.depth(keys, rank, (0, 1))
            assert match.best == self.map.best(named(keys)) == self.oracle.best(keys)

    def teardown(self) -> None:
        for rank, keys in self.under_way:
            self.map.settle(rank, named(keys))
        for rank in range(RANKS):
            self.map.clear_rank(rank)
        assert self.map.num_arriving() == 0
        while not self.map.sweep(50):
            self.map.check()
        assert self.map.num_blocks == 0


class FullMapMachine(MapMachine):
    """The same with room for few blocks; swept at once, as dead keys take room until they are."""

    max_blocks = MAX_BLOCKS

    @invariant()
    def sweep_all(self) -> None:
        while not self.map.sweep(1000):
            pass

    @invariant()
    def is_within_its_cap(self) -> None:
        assert self.map.num_blocks <= MAX_BLOCKS


class ClosedMachine(RuleBasedStateMachine):
    """Ranks that promise prefix-closed holdings, and one that does not: jumps change no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.map = PrefixMap(RANKS)
        self.oracle = Oracle(10_000)
        for rank in range(RANKS - 1):
            self.map.promise(rank, True)

    @rule(rank=ranks, prompt=prompts, end=st.integers(1, 24), tier=st.sampled_from([0, 1]))
    def add_prefix(self, rank: int, prompt: list[int], end: int, tier: int) -> None:
        self.map.add(rank, named(prompt[:end]), Tier(tier))
        self.oracle.add(rank, prompt[:end], tier)

    @rule(rank=ranks, prompt=prompts, start=st.integers(0, 24))
    def remove_tails(self, rank: int, prompt: list[int], start: int) -> None:
        """Whatever loses its prefix goes as well, on both tiers."""
        for other in PROMPTS:
            tail = other[start:] if start >= 3 and other is prompt else []
            if start < 3 and other[0] == prompt[0]:
                tail = other[start:]
            for plane in (0, 1):
                self.map.remove(rank, named(tail), Tier(plane))
                self.oracle.remove(rank, tail, plane)

    @rule(prompt=prompts, span=spans, tier=st.sampled_from([Tier.DEVICE, Tier.STORE]))
    def add_with_holes(self, prompt: list[int], span: list[int], tier: Tier) -> None:
        keys = prompt[span[0] : span[1]]
        self.map.add(RANKS - 1, named(keys), tier)
        self.oracle.add(RANKS - 1, keys, min(tier, 2))

    @rule(rank=ranks)
    def clear_rank(self, rank: int) -> None:
        self.map.clear_rank(rank)
        self.oracle.clear(rank)

    @rule(budget=st.integers(1, 400))
    def sweep(self, budget: int) -> None:
        self.map.sweep(budget)

    answers_like_the_oracle = MapMachine.answers_like_the_oracle


for machine in (MapMachine, FullMapMachine, ClosedMachine):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestMap = MapMachine.TestCase
TestFullMap = FullMapMachine.TestCase
TestClosed = ClosedMachine.TestCase


def some_blocks(count: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(count * HASH_BYTES)


def first(blocks: bytes, count: int) -> bytes:
    return blocks[: count * HASH_BYTES]


def test_hashes_and_their_keys_name_the_same_blocks() -> None:
    seed = namespace(secret=b"s", revision="r")
    hashes = block_hashes(pack_ids(range(64)), 16, seed)
    by_hash = PrefixMap(2)
    by_hash.add(1, hashes, Tier.DEVICE)
    assert by_hash.match(hashes).device.tolist() == [0, 4]
    assert by_hash.keys(1, Tier.DEVICE) == sorted(low64(hashes))


def test_x01_x03_a_cleared_rank_has_no_credit_and_can_be_filled_again_at_once() -> None:
    blocks = some_blocks(500)
    prefix_map = PrefixMap(2)
    prefix_map.add(0, blocks, Tier.DEVICE)
    prefix_map.clear_rank(0)
    assert prefix_map.match(blocks).device[0] == 0
    prefix_map.add(0, first(blocks, 10), Tier.DEVICE)
    for _ in range(20):
        assert prefix_map.match(blocks).device[0] == 10
        prefix_map.sweep(100)
    while not prefix_map.sweep(100):
        pass
    assert prefix_map.num_blocks == 10


def test_x05_blocks_and_bits_follow_what_is_held() -> None:
    """Ranks that are cleared and refilled for ever leave neither blocks nor ever more sets."""
    prefix_map = PrefixMap(3)
    for life in range(200):
        blocks = some_blocks(40, seed=life)
        for rank in range(3):
            prefix_map.add(rank, blocks, Tier.DEVICE)
        assert prefix_map.num_blocks <= 3 * 40
        for rank in range(3):
            prefix_map.clear_rank(rank)
        while not prefix_map.sweep(64):
            pass
        assert prefix_map.num_blocks == 0
        prefix_map.check()
    assert prefix_map._sets.tally.item(USED) < 20


def test_x07_a_dropped_rank_has_no_credit_and_forgets_its_arrivals() -> None:
    blocks = some_blocks(8)
    prefix_map = PrefixMap(2)
    prefix_map.add(0, blocks, Tier.DEVICE)
    prefix_map.add(1, first(blocks, 2), Tier.DEVICE)
    prefix_map.arrive(0, blocks)
    prefix_map.drop_rank(0)
    assert prefix_map.match(blocks).device.tolist() == [0, 2]
    prefix_map.settle(0, blocks)
    assert prefix_map.num_arriving() == 0
    assert prefix_map.match(blocks).best == 2


def test_x10_tiers_are_told_apart_and_cumulative() -> None:
    blocks = some_blocks(6)
    prefix_map = PrefixMap(3)
    prefix_map.add(0, first(blocks, 2), Tier.DEVICE)
    prefix_map.add(0, first(blocks, 4)[2 * HASH_BYTES :], Tier.HOST)
    prefix_map.add(1, first(blocks, 3), Tier.HOST)
    prefix_map.add(2, blocks, Tier.STORE)
    match = prefix_map.match(blocks)
    assert match.device.tolist() == [2, 0, 0]
    assert match.host.tolist() == [4, 3, 0]
    assert match.best == 6


def test_arriving_blocks_count_once_per_request() -> None:
    blocks = some_blocks(4)
    prefix_map = PrefixMap(1)
    prefix_map.arrive(0, blocks)
    prefix_map.arrive(0, first(blocks, 3))
    prefix_map.settle(0, blocks)
    assert prefix_map.match(blocks).device[0] == 3
    prefix_map.add(0, first(blocks, 1), Tier.DEVICE)
    prefix_map.settle(0, first(blocks, 3))
    assert prefix_map.match(blocks).device[0] == 1
    assert prefix_map.num_arriving() == 0


def test_an_evicted_block_is_not_credited_for_a_request_that_had_it_confirmed() -> None:
    blocks = some_blocks(2)
    prefix_map = PrefixMap(1)
    prefix_map.arrive(0, blocks)
    prefix_map.add(0, blocks, Tier.DEVICE)
    prefix_map.remove(0, blocks[HASH_BYTES:], Tier.DEVICE)
    assert prefix_map.match(blocks).device[0] == 1


def test_an_arrival_survives_the_settling_of_an_earlier_confirmed_one() -> None:
    blocks = some_blocks(2)
    prefix_map = PrefixMap(1)
    prefix_map.arrive(0, blocks)
    prefix_map.add(0, blocks, Tier.DEVICE)
    prefix_map.remove(0, blocks, Tier.DEVICE)
    prefix_map.arrive(0, blocks)
    prefix_map.settle(0, blocks)
    assert prefix_map.match(blocks).device[0] == 2
    prefix_map.settle(0, blocks)
    assert (prefix_map.num_blocks, prefix_map.num_arriving()) == (0, 0)


def test_x05_keys_beyond_the_cap_are_refused_and_counted() -> None:
    blocks = some_blocks(10)
    prefix_map = PrefixMap(1, max_blocks=6)
    prefix_map.arrive(0, blocks)
    assert prefix_map.num_refused == 4
    assert prefix_map.match(blocks).device[0] == 6
    prefix_map.settle(0, blocks)
    assert (prefix_map.num_blocks, prefix_map.num_arriving()) == (0, 0)


def test_of_blocks_that_matched_only_what_still_arrives_is_counted() -> None:
    blocks = some_blocks(10)
    prefix_map = PrefixMap(2)
    prefix_map.add(0, first(blocks, 4), Tier.DEVICE)
    one = prefix_map.arrive(0, first(blocks, 8), held=4)
    assert one == first(blocks, 8)[4 * HASH_BYTES :]
    two = prefix_map.arrive(0, blocks, held=8)  # it matched what the first one will compute
    assert two == blocks[4 * HASH_BYTES :]
    prefix_map.settle(0, one)
    assert prefix_map.match(blocks).device[0] == 10  # the second one still computes them
    prefix_map.settle(0, two)
    assert prefix_map.match(blocks).device[0] == 4
    assert prefix_map.num_arriving() == 0


@pytest.mark.parametrize("capacity", [4, 200])
def test_w12_a_match_probes_blocks_not_ranks(capacity: int) -> None:
    """However many ranks share a prefix: one probe a block, and few with promises. What a match
    looked at is told by taking it away."""
    blocks = some_blocks(256)
    prefix_map = PrefixMap(capacity)
    held = [128 + rank % 2 * 64 for rank in range(capacity)]
    for rank in range(capacity):
        prefix_map.add(rank, first(blocks, held[rank]), Tier.DEVICE)

    def num_probed() -> int:
        num = 0
        for at in range(192):
            block = first(blocks, at + 1)[-HASH_BYTES:]
            owners = [rank for rank in range(capacity) if at < held[rank]]
            for rank in owners:
                prefix_map.remove(rank, block, Tier.DEVICE)
            num += prefix_map.best(blocks) != 192
            for rank in owners:
                prefix_map.add(rank, block, Tier.DEVICE)
        return num

    walked = prefix_map.match(blocks)
    assert num_probed() == 192
    for rank in range(capacity):
        prefix_map.promise(rank, True)
    jumped = prefix_map.match(blocks)
    assert num_probed() < 40
    assert np.array_equal(walked.device, jumped.device)
    assert walked.device.tolist() == held


def test_a_table_grows_with_keys_coming_and_going() -> None:
    """At each of its sizes, while keys move to the next one: whatever was added and not removed
    is found, nothing else is."""
    random, table_sizes = Random(5), set()
    prefix_map = PrefixMap(1)
    held: list[bytes] = []
    for step in range(4000):
        if len(held) < 20 or random.random() < 0.7:
            held.append(random.randbytes(HASH_BYTES))
            prefix_map.add(0, held[-1], Tier.DEVICE)
        else:
            gone = held.pop(random.randrange(len(held)))
            prefix_map.remove(0, gone, Tier.DEVICE)
            assert prefix_map.best(gone) == 0
        assert prefix_map.best(random.choice(held)) == 1
        if step % 16 == 0:
            prefix_map.check()
            assert prefix_map.num_blocks == len(held)
            assert prefix_map.match(b"".join(held)).best == len(held)
            table_sizes.add(len(prefix_map._keys.slots))
    assert len(table_sizes) > 6


def test_ranks_cleared_faster_than_they_are_swept_get_bits_all_the_same() -> None:
    """More lives than there are bits: owner sets are swept when a bit is needed."""
    prefix_map = PrefixMap(3)
    shared = some_blocks(4)
    for life in range(300):
        own = some_blocks(2, seed=life)
        for rank in range(3):
            prefix_map.add(rank, shared + own, Tier.DEVICE)
        assert prefix_map.match(shared + own).device.tolist() == [6, 6, 6]
        for rank in range(3):
            prefix_map.clear_rank(rank)
    prefix_map.check()
    assert prefix_map.match(shared).best == 0
    while not prefix_map.sweep(7):
        pass
    prefix_map.check()
    assert prefix_map.num_blocks == 0


def test_a_block_of_key_zero_is_a_block() -> None:
    blocks = bytes(HASH_BYTES)
    prefix_map = PrefixMap(2)
    assert prefix_map.match(blocks).best == 0
    prefix_map.arrive(1, blocks)
    assert prefix_map.match(blocks).device.tolist() == [0, 1]
    prefix_map.settle(1, blocks)
    assert prefix_map.num_blocks == 0

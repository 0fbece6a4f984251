"""The benchmarks' simulated ranks speak the worker's protocol: a real Master believes what is
true."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from bench.background import Background
from bench.conversation import BLOCK, Arrival, Turn
from bench.lean_fleet import LeanFleet
from bench.lean_link import LeanCache
from bench.load import Load
from bench.ticker import every_tick
from rtp.config import MasterConfig
from rtp.core.commands import Note
from rtp.core.types import HASH_BYTES, Tier
from rtp.master import MasterServer
from tests.support.keys import low64

SECRET = b"0" * 32
PROFILE = (1e-3, 1e-6, 0.0, 0.02, 2e-4, 1e-7)


def an_arrival(number: int, keys: tuple[int, ...], parts: tuple[bytes, ...], at: float) -> Arrival:
    tokens = sum(map(len, parts)) // HASH_BYTES * BLOCK + 10
    turn = Turn(at=0.0, num_tokens=tokens, output_tokens=5, segments=(), chat=0)
    return Arrival(number=number, at=at, turn=turn, chat=f"c{keys[0]}", keys=keys, parts=parts)


def some_arrivals(count: int, seed: int = 0) -> list[Arrival]:
    """Prompts with one of five heads of three blocks, half of them with a tail of two more."""
    random = Random(seed)
    parts = {key: random.randbytes(HASH_BYTES * (3 if key < 5 else 2)) for key in range(25)}
    arrivals = []
    for number in range(count):
        head = random.randrange(5)
        keys = (head, 5 + head * 4 + random.randrange(4)) if random.random() < 0.5 else (head,)
        arrivals.append(an_arrival(number, keys, tuple(parts[k] for k in keys), number * 1e-3))
    return arrivals


@contextlib.asynccontextmanager
async def a_master(tmp_path: Path) -> AsyncIterator[tuple[MasterServer, list[Note]]]:
    notes: list[Note] = []
    server = MasterServer(MasterConfig(port=0, state=tmp_path), SECRET, notes.append)
    await server.start()
    try:
        yield server, notes
    finally:
        await server.stop()


async def test_every_request_ends_once_and_the_masters_view_is_the_truth(tmp_path: Path):
    async with a_master(tmp_path) as (server, notes):
        fleet = LeanFleet(
            secret=SECRET,
            prefill_ranks=12,
            decode_ranks=4,
            ranks_per_link=8,
            blocks_per_rank=12,
            profile=PROFILE,
            on_end=lambda job: load.ended(job),
        )
        core = server._core  # what it believes is in no interface
        background = Background([link for link in fleet.links if len(link.ranks) == 4], 2, 0)
        load = Load(fleet, background, server.url.partition("://")[2], SECRET)
        await fleet.start(server.url)
        await load.connect()
        arrivals = some_arrivals(300)

        ranks = [(link.register.worker_id, rank) for link in fleet.links for rank in link.ranks]

        def believed() -> list[list[int]]:
            rows = [core.fleet.row_of((worker_id, rank.rank)) for worker_id, rank in ranks]
            return [core.map.keys(row, Tier.DEVICE) for row in rows]

        def held() -> list[list[int]]:
            return [sorted(low64(b"".join(rank.cache.keys()))) for _, rank in ranks]

        def usable() -> bool:
            models = server.overview()["models"].values()
            return sum(model["usable_ranks"] for model in models) == 16

        async with asyncio.timeout(20):
            await every_tick(fleet.tick, usable)
            end = an_arrival(len(arrivals), (99,), (bytes(16),), 1e9)
            window = load.begin(iter([*arrivals, end]), 0.0, 1e9)
            await every_tick(load.turn, lambda: load.num_ended == len(arrivals))
            await every_tick(fleet.tick, lambda: core.idle() and believed() == held())
        assert (load.num_asked, load.num_granted, load.refused, load.lost) == (300, 300, [], [])
        assert window.asked == window.granted == window.ended == 300
        assert len(window.at_once) + len(window.held) == 300
        assert fleet.cached_tokens > 0
        facts = server.overview()
        assert facts["requests"]["leases_expired"] == 0
        assert all(worker["view"]["gaps"] == 0 for worker in facts["workers"])
        assert facts["cache"]["hit_tokens"] == fleet.cached_tokens
        assert not [note for note in notes if note.event == "core.failed"]
        await load.close()
        await fleet.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_cache_tells_all_that_it_gains_and_loses_and_stays_prefix_closed(seed: int):
    cache, told, random = LeanCache(20), set(), Random(seed)
    for arrival in some_arrivals(200, seed):
        cache.use(arrival.keys, arrival.parts)
        if random.random() < 0.3:
            added, removed = cache.take_changes()
            told |= set(added)
            assert told.issuperset(removed)
            told -= set(removed)
            assert told == set(cache.keys())
            assert cache.num_changes == 0
        held = set(cache.keys())
        assert sum(map(len, held)) <= 20 * HASH_BYTES
        heads = {a.parts[1]: a.parts[0] for a in some_arrivals(200, seed) if len(a.parts) > 1}
        assert all(heads[tail] in held for tail in held if tail in heads)


def test_a_match_never_covers_the_last_token():
    cache = LeanCache(20)
    parts = (os.urandom(2 * HASH_BYTES),)
    cache.use((1,), parts)
    arrival = an_arrival(0, (1,), parts, 0.0)
    assert cache.matched(arrival) == 2 * BLOCK
    exact = Turn(at=0.0, num_tokens=2 * BLOCK, output_tokens=5, segments=(), chat=0)
    assert cache.matched(Arrival(0, 0.0, exact, "", (1,), parts)) == BLOCK

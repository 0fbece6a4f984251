"""One prefix index in a process of its own, told what to do line by line (see prefix_map.py).

    python -m bench.prefix_sides ours|walk|radix BLOCKS RANKS SEED HEADS

Each line on standard input is a JSON array, each answer a JSON object. Times are microseconds a
call: `cpu` of the whole process (an index may work on another thread) in the mean, wall time as
percentiles.
"""

from __future__ import annotations

import gc
import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from bench.prefix_load import Load

BLOCK_SIZE = 16
SWEEP = 2000
CHURN = 64
FloatArray = np.ndarray[Any, np.dtype[np.float64]]


class Side(Protocol):
    """An index under test. Prompts and events are given in the form that its API takes."""

    def fill(self, load: Load) -> None: ...

    def prompt(self, keys: Sequence[int]) -> object: ...

    def lookup(self, prompt: Any) -> FloatArray:
        """[ranks] tokens matched on device or host; for ours, device beside it."""
        ...

    def events(self, rank: int, parent: int, key: int) -> tuple[bytes, bytes]:
        """The message that stores one block behind its parent, and the one that removes it."""
        ...

    def apply(self, rank: int, event: bytes) -> None: ...


class Ours:
    """The Master's map: device and host columns from one match; Deltas as they come in a frame."""

    def __init__(self, ranks: int, *, jumps: bool) -> None:
        import msgspec

        from rtp.core.master.prefix_map import PrefixMap
        from rtp.core.messages import Delta
        from rtp.core.types import Tier

        self._tier, self._tiers = Tier, tuple(Tier)
        self.map = PrefixMap(ranks)
        for rank in range(ranks):
            self.map.promise(rank, jumps)
        self._decode = msgspec.msgpack.Decoder(Delta).decode

    def fill(self, load: Load) -> None:
        heads = [self.prompt(keys) for keys in load.heads]
        for rank in range(load.ranks):
            for head in heads:
                self.map.add(rank, head, self._tier.DEVICE)
        for conversation in load.conversations:
            hashes = self.prompt(conversation.keys)
            for holding in conversation.holdings:
                device, host = hashes[: 16 * holding.device], hashes[16 * holding.device :]
                host = host[: 16 * (holding.held - holding.device)]
                self.map.add(holding.rank, device, self._tier.DEVICE)
                self.map.add(holding.rank, host, self._tier.HOST)

    def prompt(self, keys: Sequence[int]) -> bytes:
        return b"".join(bytes(8) + key.to_bytes(8, "big") for key in keys)

    def lookup(self, prompt: bytes) -> FloatArray:
        match = self.map.match(prompt)
        self.device = held = match.device * BLOCK_SIZE
        if match.host is not match.device:
            held = match.host * BLOCK_SIZE
        return held

    def events(self, rank: int, parent: int, key: int) -> tuple[bytes, bytes]:
        import msgspec

        from rtp.core.messages import Delta, KeyChange
        from rtp.core.types import Hashes, WorkerId

        def encoded(added: bytes, removed: bytes) -> bytes:
            change = KeyChange(rank, int(self._tier.DEVICE), Hashes(added), Hashes(removed))
            return msgspec.msgpack.encode(Delta(WorkerId("w"), 1, 1, 2, (change,)))

        return encoded(self.prompt([key]), b""), encoded(b"", self.prompt([key]))

    def apply(self, rank: int, event: bytes) -> None:
        for change in self._decode(event).changes:
            tier = self._tiers[change.tier]
            self.map.remove(rank, change.removed, tier)
            self.map.add(rank, change.added, tier)


class Radix:
    """The RadixTree of Dynamo's router (ai-dynamo-runtime), by its Python binding."""

    def __init__(self, ranks: int) -> None:
        from dynamo._core import RadixTree

        self._tree = RadixTree()
        self._ranks = ranks
        self._number = 0

    def fill(self, load: Load) -> None:
        for rank in range(load.ranks):
            for head in load.heads:
                self._tree.apply_event(rank, self._stored(None, head))
        for conversation in load.conversations:
            parent = conversation.head[-1] if conversation.head else None
            for holding in conversation.holdings:
                event = self._stored(parent, conversation.keys[: holding.held])
                self._tree.apply_event(holding.rank, event)

    def prompt(self, keys: Sequence[int]) -> list[int]:
        return list(keys)

    def lookup(self, prompt: list[int]) -> FloatArray:
        tokens = np.zeros(self._ranks)
        for (rank, _), blocks in self._tree.find_matches(prompt).scores.items():
            tokens[rank] = blocks * BLOCK_SIZE
        return tokens

    def events(self, rank: int, parent: int, key: int) -> tuple[bytes, bytes]:
        return self._stored(parent, [key]), self._event({"removed": {"block_hashes": [key]}})

    def apply(self, rank: int, event: bytes) -> None:
        self._tree.apply_event(rank, event)

    def _stored(self, parent: int | None, keys: Sequence[int]) -> bytes:
        blocks = [{"block_hash": key, "tokens_hash": key} for key in keys]
        return self._event({"stored": {"parent_hash": parent, "blocks": blocks}})

    def _event(self, data: object) -> bytes:
        self._number += 1
        return json.dumps({"event_id": self._number, "data": data}).encode()


def lookups(side: Side, load: Load, length: int, count: int, seed: int) -> dict[str, object]:
    """Once for the CPU time of all, once for the wall time of each."""
    prompts = [side.prompt(keys) for keys in load.prompts(length, count, seed)]
    start = time.process_time_ns()
    answers = [side.lookup(prompt) for prompt in prompts]
    cpu = time.process_time_ns() - start
    walls = []
    for prompt in prompts:
        start = time.perf_counter_ns()
        side.lookup(prompt)
        walls.append(time.perf_counter_ns() - start)
    p50, p99 = np.quantile(walls, (0.5, 0.99)) / 1000
    digest = hashlib.sha256(np.concatenate(answers).tobytes()).hexdigest()
    return {"cpu": cpu / count / 1000, "p50": p50, "p99": p99, "digest": digest}


def events(side: Side, load: Load, count: int, seed: int) -> dict[str, object]:
    """Each block is stored and, after all were, removed again."""
    pairs = [(rank, side.events(rank, *keys)) for rank, *keys in load.ends(count, seed)]
    calls = [(rank, pair[0]) for rank, pair in pairs] + [(rank, pair[1]) for rank, pair in pairs]
    start = time.process_time_ns()
    for rank, event in calls:
        side.apply(rank, event)
    side.lookup(
        side.prompt(load.conversations[0].keys[:1])
    )  # an index may apply later what it was told: wait
    return {"cpu": (time.process_time_ns() - start) / len(calls) / 1000}


def churn(side: Ours, load: Load, count: int, seed: int) -> dict[str, object]:
    """Longest single calls with new chains coming and old ones going: ms of CPU of this thread."""
    from random import Random

    source = Random(f"churn {seed}")
    longest = {"add": 0.0, "remove": 0.0, "clear": 0.0, "sweep": 0.0}

    def run(name: str, call: Callable[..., object], *arguments: object) -> object:
        start = time.thread_time_ns()
        found = call(*arguments)
        longest[name] = max(longest[name], (time.thread_time_ns() - start) / 1e6)
        return found

    device = side._tier.DEVICE
    old: list[tuple[int, bytes]] = []
    for number in range(count):
        rank = source.randrange(load.ranks)
        hashes = side.prompt([source.getrandbits(64) for _ in range(CHURN)])
        old.append((rank, hashes))
        run("add", side.map.add, rank, hashes, device)
        if number % 2:
            rank, hashes = old.pop(source.randrange(len(old)))
            run("remove", side.map.remove, rank, hashes, device)
    run("clear", side.map.clear_rank, 0)
    while not run("sweep", side.map.sweep, SWEEP):
        pass
    return dict(longest)


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    name, blocks, ranks, seed, heads = sys.argv[1], *map(int, sys.argv[2:6])
    load = Load(blocks, ranks, seed, heads)
    gc.collect()
    gc.freeze()
    gc.disable()
    side: Any = Radix(ranks) if name == "radix" else Ours(ranks, jumps=name == "ours")
    before = rss_bytes()
    start = time.perf_counter()
    side.fill(load)
    side.lookup(side.prompt(load.conversations[0].keys[:1]))
    filled = {
        "fill_s": time.perf_counter() - start,
        "bytes": (rss_bytes() - before) / load.num_blocks,
        "blocks": load.num_blocks,
    }
    print(json.dumps(filled), flush=True)
    commands = {"lookups": lookups, "events": events, "churn": churn}
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(commands[command](side, load, *arguments)), flush=True)


if __name__ == "__main__":
    main()

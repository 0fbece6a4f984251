"""Times the prefix map against a plain index of sets: matches, changes, memory, losing a rank.

    python -m bench.prefix_map [--blocks 1000000] [--ranks 1250] [--seed 0]

Both hold the same chains of 64 blocks, each on two ranks, and a head that all ranks hold. The plain
index keeps a Python set of ranks per block and intersects them block by block, as indexers that
store "block -> workers" do. Prompts are 32 blocks long; half of the own ones are known to the end,
those with the common head for 16 blocks. Times are CPU time of this thread: on a busy machine, wall
time counts the other processes. Not shown: changes between matches, tiers, the Master around it.
"""

from __future__ import annotations

import argparse
import gc
import platform
import resource
import time
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from statistics import median

import numpy as np

from rtp.core.master.prefix_map import PrefixMap
from rtp.core.types import Tier

CHAIN = 64
PROMPT = 32
NUM_MATCHES = 2000
SWEEP = 2000
HEAD = list(range(1 << 62, (1 << 62) + CHAIN))


class PlainIndex:
    """Block -> set of ranks; a match is an intersection per block and a loop over ranks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._owners: dict[int, set[int]] = {}

    def add(self, rank: int, keys: Iterable[int], tier: Tier) -> None:
        for key in keys:
            self._owners.setdefault(key, set()).add(rank)

    def match(self, keys: Iterable[int]) -> list[int]:
        depth = [0] * self._capacity
        holders: set[int] | None = None
        for key in keys:
            owners = self._owners.get(key, set())
            holders = owners if holders is None else holders & owners
            if not holders:
                break
            for rank in holders:
                depth[rank] += 1
        return depth

    def drop_rank(self, rank: int) -> None:
        for key in [key for key, owners in self._owners.items() if rank in owners]:
            self._owners[key].discard(rank)
            if not self._owners[key]:
                del self._owners[key]


def cpu_us(function: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - start) / 1000


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def row(name: str, ours: list[float], plain: list[float]) -> None:
    """us: median and p99 of both, the ratio of medians first."""
    ratio = median(plain) / median(ours)
    numbers = [median(ours), np.quantile(ours, 0.99), median(plain), np.quantile(plain, 0.99)]
    print(f"{name:40} {ratio:7.1f}x" + "".join(f"{number:12.1f}" for number in numbers))


def fill(
    index: PrefixMap | PlainIndex, options: argparse.Namespace
) -> tuple[list[float], float, list[list[int]]]:
    """us of each add, bytes a block, and some of the chains. The head goes on every rank."""
    source, times, kept = Random(options.seed), [], []
    before = rss_bytes()
    for rank in range(options.ranks):
        index.add(rank, HEAD, Tier.DEVICE)
    for number in range(options.blocks // CHAIN):
        keys = [source.getrandbits(64) for _ in range(CHAIN)]
        if number % (options.blocks // CHAIN // NUM_MATCHES + 1) == 0:
            kept.append(keys)
        two = (number % options.ranks, (number * 7 + 1) % options.ranks)
        times += [cpu_us(partial(index.add, rank, keys, Tier.DEVICE)) for rank in two]
    return times, (rss_bytes() - before) / options.blocks, kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefix map against a plain index of sets.")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1250)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        f"{platform.machine()}, Python {platform.python_version()}, {options.blocks} blocks, ",
        end="",
    )
    print(f"{options.ranks} ranks, seed {options.seed}")
    gc.collect()
    gc.freeze()
    gc.disable()

    ours, plain = PrefixMap(options.ranks, max_blocks=2 * options.blocks), PlainIndex(options.ranks)
    ours_add, ours_bytes, kept = fill(ours, options)
    plain_add, plain_bytes, _ = fill(plain, options)
    half = PROMPT // 2
    unknown = Random(options.seed + 1).getrandbits(64)
    own = [k[:PROMPT] if i % 2 else k[:half] + [unknown] * half for i, k in enumerate(kept)]
    shared = [HEAD[:half] + [unknown + i] * half for i in range(len(kept))]
    print(f"{'us of CPU':40} {'ratio':>8}{'ours p50':>12}{'p99':>12}{'plain p50':>12}{'p99':>12}")
    for name, prompts in (("own prompts", own), ("a head that all hold", shared)):
        for keys in prompts:
            assert ours.match(keys).device.tolist() == plain.match(keys)
        plain_match = [cpu_us(partial(plain.match, keys)) for keys in prompts]
        for how, closed in (("walked", False), ("jumping", True)):
            for rank in range(options.ranks):
                ours.promise(rank, closed)
            times = [cpu_us(partial(ours.match, keys)) for keys in prompts]
            row(f"match {name}, {how}", times, plain_match)
    row("add 64 blocks of one rank", ours_add, plain_add)
    drop = [cpu_us(partial(ours.drop_rank, 0))]
    row("lose a rank, until it has no credit", drop, [cpu_us(partial(plain.drop_rank, 0))])
    slices = sweep(ours)
    print(f"sweeping it, {SWEEP} keys a slice: {sum(slices) / 1000:.0f} ms in all, ", end="")
    print(f"longest slice {max(slices) / 1000:.2f} ms")
    print(f"longest add {max(ours_add) / 1000:.2f} ms, plain {max(plain_add) / 1000:.2f} ms")
    print(f"bytes a block {ours_bytes:.0f}, plain {plain_bytes:.0f}")


def sweep(index: PrefixMap) -> list[float]:
    """us of each slice."""
    slices, done = [], False
    while not done:
        start = time.thread_time_ns()
        done = index.sweep(SWEEP)
        slices.append((time.thread_time_ns() - start) / 1000)
    return slices


if __name__ == "__main__":
    main()

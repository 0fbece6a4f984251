"""The Master's prefix map beside the RadixTree of Dynamo's router (ai-dynamo-runtime, Rust).

    python -m bench.prefix_map [--blocks 1000000] [--ranks 64 512] [--rounds 5] [--seed 0]

Both hold the same million blocks (prefix_load.py) and answer the same prompts with a float array of
matched tokens per rank; ours starts from binary hashes and answers for two tiers, the other starts
from a list of ints and knows no tiers. Every answer is compared. Each index is a process of its
own, all on one core; rounds alternate. `walk` is ours where ranks do not promise that tails leave
first. A head that all ranks hold is in every prompt of real traces; it costs the other index an
entry a rank, so there is a table without one as well. Claims compare CPU time, which a busy machine
disturbs less than wall time, with such heads; the other index works on a thread of its own, so all
of its process counts. Not shown: lookups while events stream in.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from bench import peers
from bench.report import ROOT, Claim, finish, machine, median

LENGTHS = {32: 2000, 256: 1000, 2000: 300}
"""Blocks of a prompt, prompts a round."""
HEADS = 8
EVENTS = 1000
CHURN = 20_000
TARGETS = {64: {32: 1.6, 256: 1.6, 2000: 1.6}, 512: {32: 1.1, 256: 1.2, 2000: 1.6}}
EVENT_TARGET, MOST_BYTES, MOST_SLICE_MS = 5.0, 100.0, 2.0


class Process:
    """One index; ask() waits for its answer."""

    def __init__(
        self, python: str, name: str, options: argparse.Namespace, ranks: int, heads: int
    ) -> None:
        sizes = map(str, (options.blocks, ranks, options.seed, heads))
        self._process = subprocess.Popen(
            [python, "-m", "bench.prefix_sides", name, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: os.sched_setaffinity(0, {options.core}),
        )
        self.filled = self._answer()

    def ask(self, *command: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("an index ended early")
        found: dict[str, Any] = json.loads(line)
        return found


def compare(options: argparse.Namespace, ranks: int, heads: int) -> list[Claim]:
    """One table; the claims it supports."""
    ours = Process(sys.executable, "ours", options, ranks, heads)
    walk = Process(sys.executable, "walk", options, ranks, heads)
    peer = Process(str(peers.python("dynamo", peers.DYNAMO)), "radix", options, ranks, heads)
    sides = {"ours": ours, "radix": peer, "walk": walk}
    where = f"{ranks} ranks, {heads or 'no'} common heads"
    print(f"\n{where}, {ours.filled['blocks']} blocks; us of CPU, and wall p50 / p99")
    print(f"{'':22}{'ratio':>7}" + "".join(f"{name:>28}" for name in sides))
    claims = []
    for length, count in LENGTHS.items():
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for number in range(options.rounds):
            seed = options.seed + number
            found = {n: s.ask("lookups", length, count, seed) for n, s in sides.items()}
            assert len({f["digest"] for f in found.values()}) == 1, "answers differ"
            for name, figures in found.items():
                rounds[name].append(figures)
        ratio = row(f"lookup of {length} blocks", rounds)
        target = TARGETS.get(ranks, {}).get(length)
        if target is not None:
            claims.append(Claim(f"lookup {length} blocks, {where}", ratio, target, "higher"))
    rounds = {name: [] for name in sides}
    for number in range(options.rounds):
        for name, side in sides.items():
            rounds[name].append(side.ask("events", EVENTS, options.seed + number))
    ratio = row("single-block event", rounds)
    claims.append(Claim(f"single-block event, {where}", ratio, EVENT_TARGET, "higher"))
    print(
        f"bytes a block: ours {ours.filled['bytes']:.0f}, radix {peer.filled['bytes']:.0f}; ",
        end="",
    )
    print(f"filled in {ours.filled['fill_s']:.1f} and {peer.filled['fill_s']:.1f} s; answers equal")
    claims.append(Claim(f"bytes a block, {where}", ours.filled["bytes"], MOST_BYTES, "lower"))
    longest = ours.ask("churn", CHURN, options.seed)
    print("longest call with chains coming and going, ms of CPU: ", end="")
    print(", ".join(f"{name} {ms:.2f}" for name, ms in longest.items()))
    worst = max(longest.values())
    claims.append(Claim(f"longest call, ms, {where}", worst, MOST_SLICE_MS, "lower"))
    for side in sides.values():
        side.close()
    return claims


def row(what: str, rounds: dict[str, list[dict[str, Any]]]) -> float:
    """Prints medians over the rounds; returns the ratio of the other's CPU to ours."""
    cells = ""
    for found in rounds.values():
        numbers = {key: median([f[key] for f in found]) for key in found[0] if key != "digest"}
        cells += f"{numbers['cpu']:12.1f} "
        cells += f"{numbers['p50']:7.1f}/{numbers['p99']:7.1f}" if "p50" in numbers else " " * 15
    ratio = median(
        [b["cpu"] / a["cpu"] for a, b in zip(rounds["ours"], rounds["radix"], strict=True)]
    )
    print(f"{what:22}{ratio:6.2f}x{cells}", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    options = parser.parse_args()
    print(machine())
    claims = [
        claim
        for ranks in options.ranks
        for heads in (HEADS, 0)
        for claim in compare(options, ranks, heads)
        if heads
    ]
    finish("prefix_map", claims)


if __name__ == "__main__":
    main()

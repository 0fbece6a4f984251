"""One worker on all cores beside llama.cpp's server: prefill, decode, memory, cold start, over
HTTP.

Both serve SmolLM2-135M-Instruct from the same file; llama.cpp in BF16, rtp in bf16. Prompts are
token ids drawn at random, so nothing is cached by chance; temperature 0, ignore_eos, token counts
from `usage`.

    python -m bench.engine [--rounds 3]

prefill: prompt tokens / TTFT with max_tokens=1.  decode: c requests at once, 64-token prompts, 128
tokens out; aggregate tokens/s, the prefill of c x 64 tokens included.  Rounds of the two servers
alternate; medians are reported. Client and servers share the cores. What it does not show: quality,
long contexts, mixed traffic."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from bench import servers
from bench.report import Claim, finish, machine, median, spread
from rtp.backends.weights.fetch import resolve

PREFILLS = (512, 2048)
CONCURRENCY = (1, 8, 32)
PROMPT, OUTPUT = 64, 128
VOCAB = 49152
SPECIAL = 17  # control tokens at the start of the vocabulary are not drawn


@dataclass
class Figures:
    """All rounds of one server."""

    cold_s: float = 0.0
    memory_mb: float = 0.0
    prefill: dict[int, list[float]] = field(default_factory=dict)
    ttft_ms: dict[int, list[float]] = field(default_factory=dict)
    decode: dict[int, list[float]] = field(default_factory=dict)
    tpot_ms: dict[int, list[float]] = field(default_factory=dict)


@dataclass
class Timed:
    """One streamed request: seconds from its start, tokens by the server's own count."""

    first_s: float
    last_s: float
    prompt_tokens: int
    tokens: int


async def stream(
    session: aiohttp.ClientSession, server: servers.Server, prompt: list[int], max_tokens: int
) -> Timed:
    """POST /v1/completions, streamed. Raises on any error, in the status or in the stream."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = last = 0.0
    usage: dict[str, int] | None = None
    async with session.post(f"{server.url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{server.name}: {reply.status} {await reply.text()}")
        async for line in reply.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{server.name}: {event['error']}")
            usage = event.get("usage") or usage
            if event.get("choices"):
                last = time.perf_counter() - start
                first = first or last
    if usage is None or usage["completion_tokens"] != max_tokens:
        raise RuntimeError(f"{server.name}: usage {usage}, {max_tokens} tokens asked for")
    return Timed(first, last, usage["prompt_tokens"], usage["completion_tokens"])


async def round_of(
    server: servers.Server, figures: Figures, draw: Callable[[int], list[int]], repeats: int
) -> None:
    """One round: every prefill length `repeats` times, every concurrency once."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # both servers alike
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        for length in PREFILLS:
            for _ in range(repeats):
                one = await stream(session, server, draw(length), 1)
                figures.prefill.setdefault(length, []).append(one.prompt_tokens / one.first_s)
                figures.ttft_ms.setdefault(length, []).append(one.first_s * 1e3)
        for c in CONCURRENCY:
            start = time.perf_counter()
            many = await asyncio.gather(
                *(stream(session, server, draw(PROMPT), OUTPUT) for _ in range(c))
            )
            elapsed = time.perf_counter() - start
            figures.decode.setdefault(c, []).append(sum(t.tokens for t in many) / elapsed)
            gaps = [(t.last_s - t.first_s) / (t.tokens - 1) * 1e3 for t in many]
            figures.tpot_ms.setdefault(c, []).append(median(gaps))


async def first_token(server: servers.Server, draw: Callable[[int], list[int]]) -> float:
    """Seconds from the process's start to its first token."""
    async with aiohttp.ClientSession() as session:
        await stream(session, server, draw(16), 1)
    return time.perf_counter() - server.started


def table(ours: Figures, theirs: Figures) -> str:
    """Ratio first, then both, medians with lowest and highest."""
    lines = [f"{'':28}{'ratio':>7}  {'rtp':>24}  {'llama.cpp':>24}"]

    def row(what: str, a: list[float], b: list[float]) -> None:
        lines.append(f"{what:28}{median(a) / median(b):7.2f}  {spread(a):>24}  {spread(b):>24}")

    for length in PREFILLS:
        row(f"prefill {length}, tok/s", ours.prefill[length], theirs.prefill[length])
        row(f"TTFT {length}, ms", ours.ttft_ms[length], theirs.ttft_ms[length])
    for c in CONCURRENCY:
        row(f"decode c={c}, tok/s", ours.decode[c], theirs.decode[c])
        row(f"TPOT c={c}, ms", ours.tpot_ms[c], theirs.tpot_ms[c])
    row("memory, MB", [ours.memory_mb], [theirs.memory_mb])
    row("cold start, s", [ours.cold_s], [theirs.cold_s])
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="prefills of each length per round")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers must not outlive us
    threads = os.cpu_count() or 1
    rng = random.Random(args.seed)

    def draw(length: int) -> list[int]:
        return [rng.randrange(SPECIAL, VOCAB) for _ in range(length)]

    gguf = servers.bf16_weights(resolve("smollm2-135m"))
    print(f"bench.engine: {machine()}; torch threads {threads}, {args.rounds} rounds")
    ours, theirs = Figures(), Figures()
    with servers.rtp(workers=1, extra=["--threads", str(threads)]) as rtp:
        ours.cold_s = asyncio.run(first_token(rtp, draw))
        with servers.llama_cpp(gguf, threads=threads) as llama:
            theirs.cold_s = asyncio.run(first_token(llama, draw))
            for number in range(args.rounds + 1):
                for server, figures in ((rtp, ours), (llama, theirs)):
                    kept = figures if number else Figures()  # round 0 warms up
                    asyncio.run(round_of(server, kept, draw, args.repeats))
            ours.memory_mb, theirs.memory_mb = rtp.memory_mb(), llama.memory_mb()
    print(table(ours, theirs))

    def ratio(a: dict[int, list[float]], b: dict[int, list[float]], key: int) -> float:
        return median(a[key]) / median(b[key])

    targets = {1: 0.30, 8: 0.8, 32: 1.0}
    claims = [
        Claim(f"decode c={c}, rtp / llama.cpp", ratio(ours.decode, theirs.decode, c), t, "higher")
        for c, t in targets.items()
    ]
    claims += [
        Claim(
            f"prefill {n}, rtp / llama.cpp", ratio(ours.prefill, theirs.prefill, n), 0.6, "higher"
        )
        for n in PREFILLS
    ]
    finish("engine", claims)


if __name__ == "__main__":
    main()

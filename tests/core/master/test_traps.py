"""Known traps of cache-aware routing, on generated load (design section 4, end)."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from rtp.core import plugins
from tests.support.load import Job, Served, percentile, serve

HEAD = list(range(800))
"""A system prompt that every request shares."""


NUMBERS = itertools.count(1)


def unique(length: int) -> list[int]:
    """A prompt that shares nothing with any other."""
    start = next(NUMBERS) * 200_000
    return list(range(start, start + length))


def chats(num: int, turns: int, every_s: float, seed: int, output: int = 20) -> list[Job]:
    """Conversations that grow by 300 tokens a turn and share HEAD."""
    rng = random.Random(seed)
    jobs = []
    for chat in range(num):
        prompt, at = HEAD + unique(200), rng.random() * every_s
        for _ in range(turns):
            jobs.append(Job(at, list(prompt), output, f"c{chat}"))
            prompt += unique(300)
            at += every_s * (0.5 + rng.random())
    return sorted(jobs, key=lambda job: job.at)


def imbalance(served: list[Served], workers: int) -> float:
    counts = Counter(s.worker for s in served)
    return max(counts.values()) / (len(served) / workers)


def hit_rate(served: list[Served]) -> float:
    return sum(s.hit for s in served) / sum(len(s.job.prompt) for s in served)


def test_a_shared_head_does_not_collapse_the_load_onto_one_rank():
    """Strict longest-prefix match would send everything where the head came first."""
    jobs = [Job(i * 0.004, HEAD + unique(400)) for i in range(400)]
    served = serve(jobs)
    assert imbalance(served, 8) < 2.0
    assert hit_rate(served) > 0.6


def test_a_common_head_is_no_reason_to_wait():
    """Once all hold the head, a request behind it is not held for a busy rank."""
    warm = [Job(0.0, HEAD + unique(2000)) for _ in range(8)]
    jobs = [Job(2.0 + i * 0.012, HEAD + unique(400)) for i in range(200)]
    served = serve(warm + jobs)[8:]
    # 5.2 ms alone; the offered load is half of one rank's capacity, eight are there.
    assert percentile(served, 99) < 0.015


def test_w04_affinity_survives_long_queues():
    """Offered load over 100 %: the hit rate does not fall to that of a random choice."""
    jobs = chats(num=200, turns=5, every_s=0.3, seed=3)
    light = hit_rate(serve(chats(num=30, turns=5, every_s=1.0, seed=3), workers=2))
    heavy = serve(jobs, workers=2, cache_tokens=600_000)
    blind = serve(jobs, workers=2, cache_tokens=600_000, routing="random")
    assert percentile(heavy, 50) > 0.1, "there are queues"
    assert hit_rate(heavy) > 0.9 * light
    assert percentile(heavy, 95) < percentile(blind, 95)


def test_load_is_counted_in_tokens_not_in_requests():
    """Long and short prompts in equal numbers: shorts do not queue behind longs on a rank that has
    just as many requests."""
    jobs = [Job(i * 0.02, unique(12_000 if i % 8 == 0 else 200)) for i in range(240)]
    by_tokens = serve(jobs, workers=4)
    in_turn = serve(jobs, workers=4, routing="round_robin")
    short = [s for s in by_tokens if len(s.job.prompt) == 200]
    assert percentile(short, 95) < 0.012
    assert percentile(short, 95) <= percentile([s for s in in_turn if len(s.job.prompt) == 200], 95)


def test_a05_one_long_prompt_does_not_stall_the_short_ones():
    long = Job(0.0, unique(100_000))
    jobs = [long] + [Job(0.001 + 0.002 * i, unique(100)) for i in range(50)]
    served = serve(jobs, workers=2, cache_tokens=200_000)
    assert percentile(served[1:], 95) < 0.05
    assert served[0].ttft_s < 3.0


def test_long_prompts_are_not_starved_by_short_ones():
    """125 % offered load for 41 s: short ones alone would keep the rank; the overdue rule lets the
    long one in."""
    jobs = [Job(0.05 * i, unique(6000), 1) for i in range(820)]
    jobs.insert(24, Job(1.17, unique(30_000), 1))
    served = serve(jobs, workers=1, cache_tokens=100_000)
    long = next(s for s in served if len(s.job.prompt) == 30_000)
    assert 30.0 < long.ttft_s < 31.0
    assert max(s.job.at + s.ttft_s for s in served) > 40.0, "the load outlasted its turn"


def test_chats_return_to_their_ranks_and_spread():
    served = serve(chats(num=40, turns=5, every_s=2.5, seed=7, output=100))
    turns: dict[str, list[str]] = {}
    for s in sorted(served, key=lambda s: s.job.at):
        turns.setdefault(s.job.chat, []).append(s.worker)
    returned = [a == b for workers in turns.values() for a, b in itertools.pairwise(workers)]
    assert sum(returned) > 0.8 * len(returned)
    assert imbalance(served, 8) < 1.8


def test_a_quiet_fleet_does_not_decode_on_one_rank():
    """Prefills never queue here; what spreads the load is the decode time they would share."""
    jobs = [Job(0.05 * i, HEAD + unique(200), 100) for i in range(200)]
    assert imbalance(serve(jobs), 8) < 2.0
    alone = serve(jobs, routing=plugins.build("routing", "predicted_ttft", excess=0.0))
    assert imbalance(alone, 8) > 4.0

"""Workers whose ranks step together, in virtual time: Master, frontend and worker at once."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from rtp.backends import sim
from rtp.core.commands import Send
from rtp.core.master import window
from rtp.core.messages import Submit
from rtp.core.types import BoolArray, FloatArray, IntArray, RequestId, Role
from tests.support.cluster import Planned, a_cluster, a_request, random_tokens
from tests.support.oracles import expected_choices


def test_each_step_begins_when_the_slowest_rank_is_done():
    """A rank that decodes gets its tokens at the pace of the prefill beside it."""
    cost = {"a": 0.01, "b": 1e-3, "c": 0.0, "d": 0.01, "e": 0.0, "f": 0.0}
    times = {}
    for lockstep in (False, True):
        cluster = a_cluster(
            workers=1, ranks=2, lockstep=lockstep, routing="round_robin", runner=cost
        )
        short = cluster.begin(a_request(tokens=range(4), max_tokens=8))
        cluster.begin(a_request(tokens=range(100, 900), max_tokens=1))
        cluster.world.run_while(lambda short=short: not short.over)
        assert short.ended_at is not None
        times[lockstep] = short.ended_at - short.begun_at
    # Chunks of 128 tokens beside decode rows: 0.138 s a step, not 0.01.
    assert times[False] < 0.2
    assert 5 * 0.138 < times[True] < 8 * 0.2


def test_requests_end_right():
    cluster = a_cluster(workers=2, ranks=4, lockstep=True, worker={"steps_in_flight": 2})
    planned = [
        a_request(tokens=range(i, 20 + 13 * i), at=0.01 * i, max_tokens=1 + i % 9)
        for i in range(24)
    ]
    outcomes = cluster.run_all(planned)
    for one, outcome in zip(planned, outcomes, strict=True):
        (wanted,) = expected_choices(one.begin(RequestId("r"), 16), sim.Rule(32000, (2,)))
        assert tuple(outcome.ids) == wanted.ids
    stats = [worker.stats for worker in cluster.workers.values()]
    assert all(each.dummy_steps for each in stats)
    assert all(0 < each.group_cost().wait_share < 1 for each in stats)
    cluster.pass_time(1.0)
    assert all(worker.idle() for worker in cluster.workers.values())
    assert cluster.master.idle()


def test_requests_move_from_prefill_ranks_to_decode_ranks_that_step_together():
    """What starts together is the prefill; where it goes on nobody waits for the others."""
    roles = (Role.PREFILL, Role.DECODE)
    cluster = a_cluster(workers=2, ranks=4, lockstep=True, roles=roles)
    planned = [a_request(tokens=range(100 * i, 150 + 100 * i), max_tokens=6) for i in range(12)]
    outcomes = cluster.run_all(planned)
    for one, outcome in zip(planned, outcomes, strict=True):
        (wanted,) = expected_choices(one.begin(RequestId("r"), 16), sim.Rule(32000, (2,)))
        assert tuple(outcome.ids) == wanted.ids
    submits = [
        command.message
        for _, _, command in cluster.commands
        if isinstance(command, Send) and isinstance(command.message, Submit)
    ]
    goes_on = [any(choice.source for choice in submit.choices) for submit in submits]
    sizes = {
        later: {
            submit.group_size
            for submit, is_later in zip(submits, goes_on, strict=True)
            if is_later == later
        }
        for later in (False, True)
    }
    assert 4 in sizes[False]
    assert sizes[True] == {1}


# ---------------------------------------------------------------- length grouping


def mixed(count: int, rate: float, seed: int) -> list[Planned]:
    """Prompts of about 60 tokens, three in ten of about 2,000; `rate` a second; one token each."""
    random, at, planned = Random(seed), 0.0, []
    for _ in range(count):
        at += random.expovariate(rate)
        length = int(random.choice([60] * 7 + [2000] * 3) * random.uniform(0.5, 1.5))
        planned.append(a_request(tokens=random_tokens(random, length), at=at, max_tokens=1))
    return planned


def oldest(
    length: float,
    lengths: FloatArray,
    arrivals: FloatArray,
    eligible: BoolArray,
    count: int,
    at_ease: float,
) -> IntArray:
    """Company by age alone."""
    found = eligible.nonzero()[0]
    return found[np.lexsort((found, arrivals.take(found)))[:count]]


def ttfts(planned: list[Planned]) -> list[float]:
    cost = {"a": 0.004, "b": 1e-4, "c": 0.0, "d": 0.004, "e": 0.0, "f": 0.0, "num_blocks": 4096}
    cluster = a_cluster(
        workers=1, ranks=8, lockstep=True, runner=cost, worker={"max_batch_tokens": 4096}
    )
    outcomes = cluster.run_all(planned)
    assert all(outcome.ended and outcome.first_token_at for outcome in outcomes)
    assert all(len(outcome.grants) == 1 for outcome in outcomes)
    groups = Counter(grant.group_id for o in outcomes for _, grant in o.grants)
    for outcome in outcomes:
        _, grant = outcome.grants[0]
        assert grant.group_size == (1 if grant.group_id < 0 else groups[grant.group_id])
    assert cluster.master.rounds.num_group_grants > len(planned) / 2
    return [(o.first_token_at or 0.0) - o.begun_at for o in outcomes]


def test_company_of_like_length_lowers_ttft_and_starves_nobody(monkeypatch: pytest.MonkeyPatch):
    """Eight ranks that step together, long and short prompts mixed at a rate that they can take
    when like goes with like."""
    planned = mixed(200, rate=60.0, seed=1)
    grouped = ttfts(planned)
    monkeypatch.setattr(window, "company", oldest)
    by_age = ttfts(planned)
    assert 2 * sum(grouped) < sum(by_age)
    assert max(grouped) < max(by_age)
    long = [at for at, one in enumerate(planned) if len(one.tokens) > 500]
    assert sum(grouped[at] for at in long) < sum(by_age[at] for at in long)

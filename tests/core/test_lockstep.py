"""Workers whose ranks step together, in virtual time: Master, frontend and worker at once."""

from __future__ import annotations

from rtp.backends import sim
from rtp.core.types import RequestId
from tests.support.cluster import a_cluster, a_request
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
    assert all(0 < each.group_wait_share < 1 for each in stats)
    cluster.pass_time(1.0)
    assert all(worker.idle() for worker in cluster.workers.values())
    assert cluster.master.idle()

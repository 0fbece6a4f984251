"""Two equal ranks share the load, though one was measured while its machine was busy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rtp.backends import sim
from rtp.core.types import WorkerId
from tests.support.cluster import Cluster, Planned, a_cluster, a_request

TRUE = tuple((sim.build.__kwdefaults__ or {})[name] for name in "abcdef")
NOISY = tuple(3 * x for x in TRUE)
HEAD = tuple(range(10, 34))
"""What a chat template puts before every request: one whole block and a half."""


def two_workers(profiles: Sequence[tuple[float, ...]]) -> Cluster:
    cluster = a_cluster(workers=0)
    for index, profile in enumerate(profiles):
        cluster.start_worker(WorkerId(f"w{index}"), profile=profile, hardware="cpu x1")
    cluster.pass_time(0.5)
    return cluster


def turn(session: int, number: int, at: float) -> Planned:
    """A chat's prompt grows by a hundred tokens a turn."""
    own = range(1000 * (session + 1), 1000 * (session + 1) + 100 * (number + 1))
    return a_request(tokens=(*HEAD, *own), at=at, max_tokens=64, chat_id=f"s{session}")


@pytest.mark.parametrize("profiles", [(TRUE, NOISY), (NOISY, TRUE)])
def test_two_sessions_at_once_use_both_ranks(profiles: Sequence[tuple[float, ...]]):
    cluster = two_workers(profiles)
    used = []
    for number in range(4):
        at = cluster.now + 0.1
        outcomes = cluster.run_all([turn(s, number, at + 0.05 * s) for s in range(2)])
        used.append([outcome.rank_id for outcome in outcomes])
    assert set(used[0]) == {"w0/0", "w1/0"}
    assert used == [used[0]] * 4, "and each stays where its prefix is"


@pytest.mark.parametrize("profiles", [(TRUE, NOISY), (NOISY, TRUE)])
def test_what_would_run_beside_another_goes_to_the_idle_rank(
    profiles: Sequence[tuple[float, ...]],
):
    cluster = two_workers(profiles)
    for number in range(8):
        at = cluster.now + 0.1
        pair = [turn(2 * number + i, 0, at + 0.3 * i) for i in range(2)]
        first, second = cluster.run_all(pair)
        assert first.rank_id != second.rank_id

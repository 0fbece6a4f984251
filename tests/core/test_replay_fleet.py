"""Replays on workers with roles, and under faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rtp.backends import sim
from rtp.backends.transport import sim as sim_transport
from rtp.core import plugins
from rtp.core.errors import ConfigError
from rtp.core.replay import replay
from rtp.core.replay_fleet import Fault, Fleet, fault
from rtp.core.replayed import Replayed
from rtp.core.trace import TraceRow

BLOCK = 16
COST = {"a": 1e-3, "b": 1e-4, "c": 1e-9, "d": 5e-3, "e": 1e-4, "f": 1e-8}
FLEET = Fleet(
    runner=lambda: sim.build(
        num_blocks=4096, block_size=BLOCK, max_model_len=4096, contents=False, **COST
    ),
    profile=tuple(COST.values()),
    workers=2,
    transport=sim_transport.build(latency_s=0.001, tokens_per_s=1e6),
)
WORKERS = ("w0", "w1")


def some_rows(count: int = 40, gap_s: float = 0.05) -> list[TraceRow]:
    """Prompts of 800 tokens, 80 ms each, that share nothing."""
    return [TraceRow(gap_s * i, 800, 8, tuple(range(50 * i, 50 * i + 50))) for i in range(count)]


def run(fleet: Fleet, rows: list[TraceRow] | None = None, **options: object) -> Replayed:
    policy = plugins.build("routing", "predicted_ttft")
    return replay(rows or some_rows(), fleet, policy, **options)


def served_by(result: Replayed) -> list[int]:
    return np.bincount(result.ranks, minlength=2).tolist()


def test_requests_end_on_decode_workers_where_workers_have_roles():
    split = replace(FLEET, workers=0, prefill_workers=2, decode_workers=1)
    result = run(split)
    assert result.ok.all()
    assert (result.output_tokens == 8).all()
    placed = [grant for outcome in result.outcomes for _, grant in outcome.grants]
    assert all(grant.decode is not None or grant.worker_id == "d0" for grant in placed)
    assert any(grant.decode is not None for grant in placed)
    assert split.num_ranks == 3


def test_roles_count_ranks_in_the_order_of_their_workers():
    mixed = replace(FLEET, workers=1, prefill_workers=1, decode_workers=1, ranks=2)
    assert mixed.places() == {
        ("w0", 0): 0,
        ("w0", 1): 1,
        ("p0", 0): 2,
        ("p0", 1): 3,
        ("d0", 0): 4,
        ("d0", 1): 5,
    }


def test_ranks_that_step_together_serve_a_trace():
    result = run(replace(FLEET, workers=1, ranks=4, lockstep=True))
    assert result.ok.all()
    assert len(set(result.ranks.tolist())) > 1


def test_a_lost_workers_requests_are_served_elsewhere():
    result = run(replace(FLEET, faults=(Fault(0.5, "lost", "w0"),)))
    assert result.ok.all()
    assert (result.attempts > 1).any(), "some were running there"
    assert set(result.ranks[20:].tolist()) == {1}


def test_a_worker_that_comes_back_serves_again():
    faults = (Fault(0.5, "lost", "w0"), Fault(1.0, "back", "w0"))
    result = run(replace(FLEET, faults=faults), some_rows(80))
    assert result.ok.all()
    assert 0 in result.ranks[50:]


@pytest.mark.parametrize("which", ["w0", "w0/0"])
def test_a_slow_rank_gets_less_to_do(which: str):
    slow = served_by(run(replace(FLEET, faults=(Fault(0.0, "slow", which, 4.0),))))
    assert slow[0] < 0.7 * slow[1]
    assert sum(slow) == 40


def test_late_reports_cost_time_and_lose_nothing():
    rows = some_rows(80, gap_s=0.03)
    soon, late = run(FLEET, rows), run(replace(FLEET, faults=(Fault(0, "late", "*", 0.2),)), rows)
    assert late.ok.all()
    assert late.ttft_s.mean() > soon.ttft_s.mean()


def test_steps_vary_about_what_they_should_take_and_repeat_by_seed():
    rows = some_rows(200, gap_s=1.0)
    fleet = replace(FLEET, service_error=0.3)
    exact = run(FLEET, rows, decode=False).ttft_s
    varied, again = (run(fleet, rows, decode=False, seed=1).ttft_s for _ in range(2))
    other = run(fleet, rows, decode=False, seed=2).ttft_s
    np.testing.assert_array_equal(varied, again)
    assert not np.array_equal(varied, other)
    ratio = varied / exact
    assert ratio.mean() == pytest.approx(1.0, abs=0.06)
    assert ratio.std() == pytest.approx(0.3, abs=0.05)


def test_sessions_are_chats_and_tenants_are_tenants():
    rows = [TraceRow(0.5 * i, 800, 4, tuple(range(50)), session=7, tenant="a") for i in range(4)]
    assert run(FLEET, rows).ok.all()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("600:lost:w3", Fault(600.0, "lost", "w3")),
        ("0:slow:w0/1:2", Fault(0.0, "slow", "w0/1", 2.0)),
        ("1.5:late:*:0.2", Fault(1.5, "late", "*", 0.2)),
    ],
)
def test_faults_are_told_as_text(text: str, found: Fault):
    assert fault(text) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("600:lost", "AT:WHAT"),
        ("x:lost:w0", "AT:WHAT"),
        ("1:gone:w0", "no kind 'gone'"),
        ("1:slow:w0", "a number"),
        ("1:lost:w0:2", "no number"),
        ("-1:lost:w0", "a time"),
    ],
)
def test_a_fault_that_is_none_is_told(text: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        fault(text)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"workers": 0}, "needs workers"),
        ({"workers": 0, "prefill_workers": 1}, "need each other"),
        ({"decode_workers": 1, "transport": None}, "transport"),
        ({"service_error": 0.7}, "service_error"),
        ({"faults": (Fault(0, "lost", "w9"),)}, "w9"),
        ({"faults": (Fault(0, "lost", "w0/0"),)}, "w0/0"),
    ],
)
def test_a_cluster_that_cannot_serve_is_refused(changes: dict, reason: str):
    with pytest.raises(ConfigError, match=reason):
        run(replace(FLEET, **changes))

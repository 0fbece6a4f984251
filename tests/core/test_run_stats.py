"""Figures of a run: failures beside percentiles, shares of all requests, where the time went."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rtp.core.confidence import difference, student_975
from rtp.core.messages import Grant
from rtp.core.outcomes import Outcome
from rtp.core.replayed import FAILED_TYPE, Replayed, replayed
from rtp.core.run_series import series
from rtp.core.run_stats import Slo, quantiles, stats
from rtp.core.trace import TraceRow
from rtp.core.types import RequestId, WorkerId

NAN = float("nan")


def a_run(count: int = 100, *, failing: int = 0, ttft_s: float = 0.5) -> Replayed:
    """One request a second, each with a grant after 0.1 s and 11 tokens in 1 s more; the last
    `failing` of them fail at once."""
    arrival = np.arange(count, dtype=np.float64)
    fails = arrival >= count - failing
    return Replayed(
        arrival_s=arrival,
        granted_s=np.where(fails, NAN, arrival + 0.1),
        first_s=np.where(fails, NAN, arrival + ttft_s),
        ended_s=np.where(fails, arrival, arrival + ttft_s + 1.0),
        ranks=np.where(fails, -1, np.arange(count) % 2),
        prompt_tokens=np.full(count, 100),
        cached_tokens=np.where(fails, 0, 25),
        output_tokens=np.where(fails, 0, 11),
        attempts=np.where(fails, 0, 1),
        failed=np.where(fails, "503 overloaded", "").astype(FAILED_TYPE),
    )


def figures(run: Replayed, slo: Slo | None = None):
    count = len(run.ok)
    return stats(run, slo or Slo(1.0, 0.0), np.zeros(count), np.full(count, 0.3), 2)


def test_t07_failures_stand_beside_percentiles_and_count_in_shares_and_goodput():
    """T07: half the requests fail; what is left is as fast as ever."""
    whole, half = figures(a_run()), figures(a_run(failing=50))
    assert half.ttft_s.p95 == pytest.approx(whole.ttft_s.p95)
    assert (half.ended, half.failed, half.failures) == (50, 50, {"503 overloaded": 50})
    assert half.ttft_s.count == 50
    assert whole.slo_share == 1.0
    assert half.slo_share == 0.5
    assert half.goodput == pytest.approx(whole.goodput * 0.5, rel=0.03)
    assert half.requests_per_s == pytest.approx(50 / half.seconds)
    assert series(a_run(failing=50)).ttft_cdf.y[-1] == 0.5


def test_a_run_in_which_all_fail_has_no_percentiles_and_no_rates():
    none = figures(a_run(failing=100))
    assert none.ttft_s.count == 0
    assert none.ttft_s.p95 is None
    assert (none.slo_share, none.goodput, none.requests_per_s, none.hit_ratio) == (0, 0, 0, 0)
    assert none.phases is None
    assert none.imbalance is None
    assert series(a_run(failing=100)).ttft_cdf.y == []


def test_latencies_hits_and_phases():
    found = figures(a_run())
    assert found.ttft_s.max == pytest.approx(0.5)
    assert found.tpot_s.p50 == pytest.approx(0.1)
    assert found.e2e_s.mean == pytest.approx(1.5)
    assert found.hit_ratio == 0.25
    assert found.hits == {"device": 0.25}
    assert found.imbalance == 1.0
    phases = found.phases
    assert phases is not None
    values = [phases.queue_s, phases.rank_s, phases.prefill_s, phases.decode_s]
    assert values == pytest.approx([0.1, 0.1, 0.3, 1.0])
    assert (found.queue_max, found.queue_mean) == (1, pytest.approx(0.1, rel=0.02))


def test_a_run_whose_grants_are_not_seen_tells_nothing_of_the_master():
    """Nor does it take a request on its way for one that waits; one that was never granted does."""
    seen = replace(a_run(), granted_s=np.full(100, NAN), attempts=np.zeros(100, dtype=np.int64))
    unseen = replace(seen, grants_seen=False)
    found = figures(unseen)
    told = (found.queue_max, found.queue_mean, found.phases, found.retried, found.held)
    assert told == (None,) * 5
    assert (series(unseen).waiting, series(unseen).prefilling) == (None, None)
    assert series(unseen).decoding == series(seen).decoding
    assert figures(seen).queue_max == 2
    assert not Replayed.from_bytes(unseen.to_bytes()).grants_seen


def test_goals_of_first_and_of_later_tokens():
    run = a_run(ttft_s=1.375)
    assert figures(run, Slo(1.5, 0.0)).slo_share == 1.0
    assert figures(run, Slo(1.3, 0.0)).slo_share == 0.0
    assert figures(run, Slo(1.5, 0.0, tpot_s=0.11)).slo_share == 1.0
    assert figures(run, Slo(1.5, 0.0, tpot_s=0.09)).slo_share == 0.0
    alone_s = np.where(np.arange(100) < 30, 0.2, 0.0)
    assert Slo(1.0, 2.0).met(run, alone_s).sum() == 30


def test_quantiles_reach_the_last_of_a_thousand():
    found = quantiles(np.arange(1001, dtype=np.float64))
    values = [found.p50, found.p99, found.p999, found.max]
    assert values == pytest.approx([500.0, 990.0, 999.0, 1000.0])


def test_curves_count_who_waits_and_break_where_there_is_too_little():
    found = series(a_run())
    assert found.waiting is not None
    assert max(v for v in found.waiting.y if v is not None) == 1
    assert found.decoding.y[len(found.decoding.y) // 2] == 1
    assert {len(c.x) for c in (found.ttft_p50, found.ttft_p95, found.hit_ratio)} == {5}
    assert found.ttft_p95.y == pytest.approx([0.5] * 5)


def test_columns_cross_processes_as_bytes():
    run = a_run(failing=3)
    again = Replayed.from_bytes(run.to_bytes())
    np.testing.assert_array_equal(again.first_s, run.first_s)
    assert again.failed.tolist() == run.failed.tolist()
    assert again.to_bytes() == run.to_bytes()


def test_a_difference_is_certain_where_all_seeds_agree():
    sure = difference([1.0, 2.0, 3.0, 4.0], [2.0, 3.1, 4.0, 4.9])
    assert sure.mean == pytest.approx(1.0)
    assert sure.certain
    unsure = difference([1.0, 2.0, 3.0], [2.0, 1.0, 3.1])
    assert not unsure.certain
    assert difference([1.0], [2.0]).low is None
    # Student's t, two values: 12.706 standard errors.
    two = difference([0.0, 0.0], [1.0, 3.0])
    assert (two.low, two.high) == pytest.approx((2 - 12.706, 2 + 12.706))


def test_a_request_that_lost_its_rank_waited_until_the_grant_of_its_first_token():
    """Decoding, its rank is lost; another grant comes after its first token."""
    outcome = Outcome(RequestId("r"), 0.0)
    places = {("w0", 0): 0, ("w1", 0): 1}
    for at, worker in ((1.0, "w0"), (5.0, "w1")):
        outcome.grants.append((at, Grant(RequestId("r"), 1, 0, WorkerId(worker), 1, "", 0, 0, 0.0)))
    outcome.first_token_at, outcome.ended_at = 2.0, 9.0
    rows = [TraceRow(0.0, 100, 10, ())]
    run = replayed(rows, [outcome], places, start_s=0.0, num_holds=0)
    assert (run.granted_s[0], run.ranks[0], run.attempts[0]) == (1.0, 0, 2)


def test_imbalance_is_of_the_ranks_that_prefill():
    """Two that do and one that decodes, which prefilled a little: counted nowhere."""
    ranks, prompts = np.array([0, 1, 2]), np.array([300, 100, 50])
    run = replace(a_run(3), ranks=ranks, prompt_tokens=prompts, cached_tokens=np.zeros(3, np.int64))
    assert run.imbalance(2) == 1.5


def test_the_interval_stays_students_beyond_the_table():
    """Against published tables of t at 0.975."""
    assert student_975(30) == 2.042
    for freedom, t in ((31, 2.0395), (40, 2.0211), (60, 2.0003), (120, 1.9799)):
        assert student_975(freedom) == pytest.approx(t, abs=2e-4)

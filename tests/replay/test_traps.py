"""Four traps of cache-aware routing (design section 4, end): a naive policy falls into each, the
default does not. Whole clusters in virtual time, on the Mooncake conversation trace and on a sample
of the same statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from rtp.core.replay import Replayed
from rtp.core.trace import TraceRow
from tests.replay.fleet import NUM_RANKS, p95, prefill_only
from tests.replay.naive import FewestRequests, LongestPrefix, RandomBand, WaitForTheHolder
from tests.support.traces import conversation, only_head_shared, returning, sample

FEW = 300
"""Requests of a run; 90 s of the traces."""
MANY = 1000
"""Requests of which the returning ones are taken."""
CROWDED = 10.0
"""Speed at which these have long queues everywhere."""
BAND = 2.0

Source = Callable[[], list[TraceRow]]
both = pytest.mark.parametrize(
    "source", [sample, pytest.param(conversation, marks=pytest.mark.slow)]
)


@cache
def by_default(source: Source) -> Replayed:
    return prefill_only(source()[:FEW])


@both
def test_strict_longest_prefix_match_collapses_onto_one_rank(source: Source) -> None:
    """Block 0 is in every request: whoever computed it first holds something of every prompt."""
    rows = source()[: FEW // 2]
    assert {row.block_ids[0] for row in rows} == {0}
    naive = prefill_only(rows, LongestPrefix(), early=True)
    ours = prefill_only(rows)
    assert naive.imbalance(NUM_RANKS) == NUM_RANKS
    assert ours.imbalance(NUM_RANKS) < 1.3
    assert p95(ours) < p95(naive) / 10


@both
def test_w04_a_wide_tie_band_destroys_affinity_when_queues_are_long(source: Source) -> None:
    """Where every wait is many seconds, all ranks are within a share of the best; their hits are
    not. The default keeps at long queues most of what there is to hit."""
    rows = returning(source()[:MANY])
    there_is = prefill_only(rows, speed=1.0).hit_ratio
    naive = prefill_only(rows, RandomBand(BAND), speed=CROWDED, early=True)
    ours = prefill_only(rows, speed=CROWDED)
    assert np.median(naive.ttft_s) > 5.0, "there are long queues"
    assert naive.hit_ratio < there_is / 2
    assert ours.hit_ratio > 0.75 * there_is
    assert p95(ours) < p95(naive) / 2


@both
def test_counting_requests_misjudges_load(source: Source) -> None:
    """Prompts of 1,000 and of 100,000 tokens are one request each: short ones queue behind them."""
    rows = source()[:FEW]
    naive = prefill_only(rows, FewestRequests(), early=True)
    ours = by_default(source)
    assert p95(ours) < 0.8 * p95(naive)
    assert np.median(ours.ttft_s) < np.median(naive.ttft_s)


@both
def test_the_common_head_is_no_reason_to_wait(source: Source) -> None:
    """Every rank holds the head before long, so nobody saves anything by waiting for another."""
    rows = only_head_shared(source()[:FEW])
    naive = prefill_only(rows, WaitForTheHolder())
    ours = prefill_only(rows)
    assert naive.num_holds > 0
    assert ours.num_holds == 0
    assert ours.hit_ratio > 0.9 * 512 / np.mean([row.num_tokens for row in rows])
    assert p95(ours) < 1.01 * p95(naive), "waiting gained nothing"

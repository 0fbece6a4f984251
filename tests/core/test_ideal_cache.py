"""What caches would find: the plain walk, against hand counts and against the simulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rtp.backends import sim
from rtp.core import plugins
from rtp.core.ideal_cache import found
from rtp.core.replay import Fleet, replay
from rtp.core.trace import TraceRow
from rtp.core.types import IntArray
from tests.replay.fleet import BLOCK_SIZE
from tests.support.traces import conversation, sample, synthetic

LONGEST = 200_000
COST = {"a": 1e-3, "b": 1e-6, "c": 0.0, "d": 1e-3, "e": 0.0, "f": 0.0}
APART_S = 1e-4
"""Between two rows of one instant, so that the order in which they reach the ranks is theirs."""
ALONE_S = 0.2
"""Longer than any prompt takes: no two are there at once, and none waits for room."""


def computed_by_the_cluster(
    rows: Sequence[TraceRow], ranks: int, num_blocks: int | None = None
) -> IntArray:
    """Prompt tokens that round robin over so many ranks computes, by row: bound as they arrive,
    each rank one prompt at a time. Where caches are finite every row comes alone."""
    endless = sum(len(row.block_ids) for row in rows) + LONGEST // BLOCK_SIZE
    fleet = Fleet(
        runner=lambda: sim.build(
            num_blocks=num_blocks or endless,
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST,
            contents=False,
            **COST,
        ),
        profile=tuple(COST.values()),
        workers=ranks,
        max_batch_tokens=LONGEST,
        max_rows=1,
    )
    routing = plugins.build("routing", "round_robin")
    one_by_one = [
        replace(row, arrival_s=ALONE_S * i if num_blocks else row.arrival_s + APART_S * i)
        for i, row in enumerate(rows)
    ]
    run = replay(one_by_one, fleet, routing, decode=False, early=True)
    return run.new_tokens


def test_the_last_token_is_computed_and_a_partly_filled_block_found_only_by_the_papers_rule():
    rows = [TraceRow(float(i), n, 1, ids) for i, (n, ids) in enumerate([
        (40, (0, 1, 2)),  # two whole blocks of 16, and half of one
        (40, (0, 1, 2)),  # all of it again
        (32, (0, 1)),  # its whole blocks
        (50, (0, 1, 3, 4)),  # another third block
    ])]  # fmt: skip
    engine, partial = found(rows, 16), found(rows, 16, partial=True)
    assert engine.found_tokens == 32 + 16 + 32
    assert partial.found_tokens == 40 + 32 + 32
    assert (engine.tokens, partial.blocks, partial.found_blocks) == (162, 12, 3 + 2 + 2)


def test_round_robin_sends_row_i_to_cache_i_modulo_their_number():
    rows = [TraceRow(float(i), 17, 1, (7, 8 + i)) for i in range(6)]
    assert found(rows, 16).found_tokens == 5 * 16
    assert found(rows, 16, caches=4).found_tokens == 2 * 16


def test_a_small_cache_forgets_the_least_recently_used_tails_first():
    def row(*ids: int) -> TraceRow:
        return TraceRow(0.0, 16 * len(ids), 1, ids)

    rows = [row(0, 1), row(2), row(0, 1), row(3), row(2), row(0, 1, 4)]
    # 3 blocks: [1 0 2] -> 0 found -> [2 1 0] -> 3 takes 2's place; 2 is computed anew, in 1's.
    assert found(rows, 16, num_blocks=3).found_blocks == 1 + 1
    assert found(rows, 16, num_blocks=2).num_too_long == 1


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("num_blocks", [None, 300])
def test_the_simulated_cluster_finds_the_same_on_the_sample(ranks: int, num_blocks: int | None):
    rows = [row for row in sample()[:300] if len(row.block_ids) <= 300]
    plain = found(rows, BLOCK_SIZE, caches=ranks, num_blocks=num_blocks)
    measured = computed_by_the_cluster(rows, ranks, num_blocks)
    assert plain.found_tokens == plain.tokens - int(measured.sum())
    assert plain.found_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "ranks", "num_blocks"),
    [(conversation, 8, None), (synthetic, 32, None), (conversation, 1, 2600)],
)
def test_the_simulated_cluster_finds_the_same_on_mooncake_traces(
    source, ranks: int, num_blocks: int | None
):
    rows = source()
    measured = computed_by_the_cluster(rows, ranks, num_blocks)
    plain = found(rows, BLOCK_SIZE, caches=ranks, num_blocks=num_blocks)
    assert plain.found_tokens == plain.tokens - int(measured.sum())

"""When rows arrive: grids spread by seed, closed loops, parts of a trace."""

from __future__ import annotations

import pytest

from rtp.backends import sim
from rtp.core import plugins
from rtp.core.arrivals import grid_s, open_loop, part, spread
from rtp.core.errors import ConfigError
from rtp.core.replay import Fleet, replay
from rtp.core.replayed import Replayed
from rtp.core.trace import TraceRow
from rtp.io.traces import read
from tests.replay.fleet import DECODE, PREFILL, alone_s, prefill_only
from tests.support.traces import sample
from traces.generate import FOLDER

TRIP_S = 0.01
"""Messages there and back, and the ticks between."""


def a_row(at: float, after: int = -1, think_s: float = 0.0, block: int = 0) -> TraceRow:
    return TraceRow(at, 5000, 1, tuple(range(block, block + 10)), after=after, think_s=think_s)


def begun(rows: list[TraceRow], speed: float = 1.0) -> list[float]:
    times = [outcome.begun_at for outcome in prefill_only(rows, speed=speed).outcomes]
    return [at - times[0] for at in times]


def test_in_closed_loop_a_row_comes_its_think_time_after_the_end_of_another():
    rows = [a_row(0.0), a_row(1.0, after=0, think_s=5.0, block=100), a_row(3.0, block=200)]
    alone = float(alone_s(rows)[0])
    assert begun(rows) == pytest.approx([0.0, alone + 5.0, 3.0], abs=TRIP_S)
    assert begun(open_loop(rows)) == pytest.approx([0.0, 1.0, 3.0])


def test_speed_divides_think_times_but_not_service():
    rows = [a_row(0.0), a_row(9.0, after=0, think_s=8.0, block=100)]
    alone = float(alone_s(rows)[0])
    assert begun(rows, speed=4.0)[1] == pytest.approx(alone + 2.0, abs=TRIP_S)


def test_several_rows_may_wait_for_one_as_sub_agents_do():
    rows = [a_row(0.0), *(a_row(1.0 + i, after=0, think_s=1.0, block=20 * i) for i in range(1, 4))]
    times = begun(rows)
    assert times[1] == times[2] == times[3] > 1.0


def test_a_row_that_waits_for_a_later_one_is_an_error_that_names_both():
    with pytest.raises(ConfigError, match="row 0 of the trace waits for row 1"):
        prefill_only([a_row(0.0, after=1), a_row(1.0)])


def test_t03_rows_of_one_instant_are_spread_over_their_grid_by_seed_alone():
    rows = [a_row(at, block=20 * i) for i, at in enumerate([0.0, 0.0, 0.0, 3.0, 3.0, 9.0])]
    once, again, other = spread(rows, 1), spread(rows, 1), spread(rows, 2)
    assert grid_s(rows) == 3.0
    assert once == again != other
    assert [row.block_ids for row in once] == [row.block_ids for row in rows]
    times = [row.arrival_s for row in once]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(set(times)) == 6


def test_each_row_of_the_sample_stays_inside_its_three_seconds():
    rows, moved = sample(), spread(sample(), 7)
    moves = [new.arrival_s - row.arrival_s for row, new in zip(rows, moved, strict=True)]
    assert 2.5 < max(moves) - min(moves) < grid_s(rows)


def test_a_part_of_a_trace_starts_at_0_and_waits_for_nothing_outside():
    rows = [a_row(0.0), a_row(4.0, after=0, think_s=1.0), a_row(6.0, after=1, think_s=2.0)]
    cut = part(rows, 1, 3)
    assert [(row.arrival_s, row.after, row.think_s) for row in cut] == [(0, -1, 0), (2, 0, 2)]
    assert part(rows, 3, 9) == []


def test_sessions_of_agents_replay_to_their_ends_in_order_and_the_same_each_time():
    rows = part(read(FOLDER / "sample_weka.jsonl.gz", most_think_s=20.0).rows, 0, 16)
    once, again = (replay_sessions(rows) for _ in range(2))
    assert repr(once.outcomes) == repr(again.outcomes)
    ends = [outcome.ended_at for outcome in once.outcomes]
    for row, outcome in zip(rows, once.outcomes, strict=True):
        if row.after >= 0:
            waited = outcome.begun_at - (ends[row.after] or 0.0)
            assert waited == pytest.approx(row.think_s, abs=1e-6)
    assert sum(row.after >= 0 for row in rows) > 10
    assert once.hit_ratio > 0.4


def replay_sessions(rows: list[TraceRow]) -> Replayed:
    """On four ranks, decoding."""
    fleet = Fleet(
        runner=lambda: sim.build(
            num_blocks=8000,
            block_size=64,
            max_model_len=200_000,
            contents=False,
            **PREFILL,
            **DECODE,
        ),
        workers=4,
        max_batch_tokens=8192,
    )
    return replay(rows, fleet, plugins.build("routing", "predicted_ttft"))

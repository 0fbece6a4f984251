"""The search for a policy's weights."""

from __future__ import annotations

import pytest

from rtp.core.search import Range, points, search

SQUARE = [Range("x", 0.0, 10.0), Range("y", 0.01, 100.0, by_ratio=True)]


def test_points_fill_the_box_evenly():
    found = points(SQUARE, 64, seed=3)
    assert all(0 <= p["x"] <= 10 and 0.01 <= p["y"] <= 100 for p in found)
    for low in range(0, 10, 2):
        assert 10 <= sum(low <= p["x"] < low + 2 for p in found) <= 16
    assert 29 <= sum(p["y"] < 1.0 for p in found) <= 35, "half of them under the geometric middle"


def test_a_seed_shifts_all_points():
    assert points(SQUARE, 4, seed=1) == points(SQUARE, 4, seed=1)
    assert points(SQUARE, 4, seed=1) != points(SQUARE, 4, seed=2)


def test_a_narrower_range_stays_inside_the_wider_one():
    narrow = Range("x", 0.0, 10.0).around(9.5)
    assert (narrow.low, narrow.high) == (pytest.approx(7.75), 10.0)
    ratio = Range("y", 1.0, 100.0, by_ratio=True).around(10.0)
    assert ratio.low * ratio.high == pytest.approx(100.0)


def test_the_search_closes_in_on_the_least_value():
    def evaluate(some: list[dict[str, float]]) -> list[float]:
        return [(p["x"] - 3.3) ** 2 for p in some]

    start = {"x": 9.0, "y": 1.0}
    tried = search(SQUARE, start, evaluate, rounds=3, points_a_round=8, seed=0)
    assert len(tried) == 25
    assert (start, (9.0 - 3.3) ** 2) in tried
    assert [value for _, value in tried] == sorted(value for _, value in tried)
    assert tried[0][0]["x"] == pytest.approx(3.3, abs=0.2)

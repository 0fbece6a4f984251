"""Company for the first request of a group round, by length."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rtp.core.master.grouping import STRETCH, company, fair_company


def chosen(length, lengths, count, *, arrivals=None, eligible=None, at_ease=0.0):
    lengths = np.array(lengths, dtype=float)
    arrivals = np.zeros(len(lengths)) if arrivals is None else np.array(arrivals, dtype=float)
    eligible = np.ones(len(lengths), dtype=bool) if eligible is None else np.array(eligible)
    return company(length, lengths, arrivals, eligible, count, at_ease).tolist()


def test_the_nearest_in_length_come_first():
    assert chosen(100, [500, 90, 102, 10, 150], 3) == [2, 1, 4]


def test_ties_go_to_the_oldest_then_the_first():
    assert chosen(100, [110, 90, 110, 90], 3, arrivals=[4, 3, 2, 3]) == [2, 1, 3]


def test_who_would_stretch_the_round_waits_for_another():
    assert chosen(100, [201, 200, 1], 3) == [2, 1]
    assert chosen(100, [8000, 7000], 3) == []


def test_what_keeps_nobody_waiting_may_join():
    assert chosen(1, [40, 60, 2], 3, at_ease=50) == [2, 0]


def test_who_may_not_go_is_not_chosen():
    assert chosen(100, [100, 100, 90], 3, eligible=[False, True, True]) == [1, 2]
    assert chosen(100, [100], 3, eligible=[False]) == []


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5), st.booleans()), max_size=40),
    st.integers(1, 20),
    st.integers(1, 9),
)
def test_it_is_the_head_of_the_sorted_list(requests, length, count):
    wanted = sorted(
        (abs(each - length), arrival, index)
        for index, (each, arrival, eligible) in enumerate(requests)
        if eligible and each <= STRETCH * length
    )
    columns = [list(column) for column in zip(*requests, strict=True)] or [[], [], []]
    lengths, arrivals, eligible = columns
    got = chosen(length, lengths, count, arrivals=arrivals, eligible=np.array(eligible, dtype=bool))
    assert got == [index for _, _, index in wanted[:count]]


def test_places_are_shared_between_tenants_however_many_each_has_waiting():
    lengths = np.full(40, 100.0)
    tenant = np.array([0] * 36 + [1] * 4)
    served = np.array([5.0, 5.0]).take(tenant)
    found = fair_company(
        100.0,
        lengths,
        np.arange(40.0),
        np.ones(40, dtype=bool),
        7,
        0.0,
        tenant,
        served,
        lambda _: 1.0,
    )
    assert tenant[found].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert found == [0, 36, 1, 37, 2, 38, 3]


def test_a_tenant_with_nobody_of_that_length_leaves_its_places_to_others():
    lengths = np.array([100.0] * 3 + [9000.0] * 3)
    tenant = np.array([0] * 3 + [1] * 3)
    served = np.array([5.0, 0.0]).take(tenant)
    found = fair_company(
        100.0,
        lengths,
        np.arange(6.0),
        np.ones(6, dtype=bool),
        7,
        0.0,
        tenant,
        served,
        lambda _: 1.0,
    )
    assert found == [0, 1, 2]

"""Weighted shares of service: who is next, and what a tenant that comes back may claim."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rtp.core.master.shares import FIRST_SIZE, OVERDUE_EVERY, Shares, Standing

WEIGHTS = {"light": 1.0, "double": 2.0, "heavy": 5.0}


def some_shares(capacity: int = 1024) -> Shares:
    return Shares(lambda tenant: WEIGHTS.get(tenant, 1.0), capacity)


def next_of(shares: Shares, *waiting: Standing) -> Standing:
    return min(waiting, key=lambda s: float(shares.virtual_s[s.row]))


def test_service_follows_the_weights_whatever_the_sizes():
    rng = random.Random(2)
    shares = some_shares()
    waiting = [shares.join(tenant) for tenant in WEIGHTS]
    got = dict.fromkeys(WEIGHTS, 0.0)
    for _ in range(4000):
        chosen = next_of(shares, *waiting)
        service_s = rng.choice([0.01, 0.1, 1.0])
        shares.granted(chosen, service_s)
        got[chosen.tenant] += service_s
    per_weight = [got[tenant] / weight for tenant, weight in WEIGHTS.items()]
    assert max(per_weight) - min(per_weight) <= 1.0 / min(WEIGHTS.values()) + 1e-9


def test_a_lone_request_is_next_however_much_another_tenant_has_had_or_waits():
    shares = some_shares()
    flood = shares.join("flood")
    for _ in range(10_000):
        shares.join("flood")
        shares.granted(flood, 1.0)
    lone = shares.join("lone")
    assert next_of(shares, flood, lone) is lone
    shares.granted(lone, 1.0)
    shares.granted(flood, 1.0)
    assert next_of(shares, flood, lone) is lone, "one service each, in turn"


def test_an_absent_tenant_saves_nothing_up():
    shares = some_shares()
    away = shares.join("away")
    shares.leave(away)
    busy = shares.join("busy")
    for _ in range(100):
        shares.granted(busy, 1.0)
    assert shares.join("away") is away
    for _ in range(2):
        shares.granted(away, 1.0)
    assert next_of(shares, away, busy) is busy


def test_coming_and_going_gains_nothing():
    """A tenant that leaves after each grant gets no more than one that stays."""
    shares = some_shares()
    steady = shares.join("steady")
    counts = {"steady": 0, "hopper": 0}
    for _ in range(1000):
        hopper = shares.join("hopper")
        chosen = next_of(shares, steady, hopper)
        shares.granted(chosen, 1.0)
        counts[chosen.tenant] += 1
        shares.leave(hopper)
    assert abs(counts["steady"] - counts["hopper"]) <= 1


def test_the_share_counts_those_that_wait_now():
    shares = some_shares()
    assert shares.share("light") == 1.0
    light = shares.join("light")
    shares.join("light")
    assert shares.share("light") == 1.0
    assert shares.share("double") == pytest.approx(2 / 3)
    double = shares.join("double")
    assert shares.share("double") == pytest.approx(2 / 3)
    assert shares.share("heavy") == pytest.approx(5 / 8)
    shares.leave(double)
    assert shares.share("light") == 1.0
    shares.leave(light)
    assert shares.num_active == 1


def test_the_one_most_over_its_share_has_most_per_weight():
    shares = some_shares()
    assert shares.most_over(lambda s: s.num_waiting) is None
    for tenant, count in (("light", 3), ("double", 5), ("heavy", 10)):
        for _ in range(count):
            shares.join(tenant)
    most = shares.most_over(lambda s: s.num_waiting)
    assert most is not None
    assert most.tenant == "light"


def test_every_fourth_grant_of_a_tenant_is_for_the_overdue():
    shares = some_shares()
    one, other = shares.join("one"), shares.join("other")
    turns = []
    for _ in range(8):
        turns.append(bool(shares.turn[one.row]))
        shares.granted(one, 1.0)
        shares.granted(other, 1.0)
    assert [i for i, turn in enumerate(turns) if turn] == [OVERDUE_EVERY - 1, 2 * OVERDUE_EVERY - 1]


def test_tenants_remembered_are_bounded_and_those_that_wait_stay():
    shares = some_shares(capacity=8)
    stays = shares.join("stays")
    for i in range(1000):
        shares.leave(shares.join(f"t{i}"))
    assert len(shares) <= 8
    assert shares.find("stays") is stays
    assert len(shares.virtual_s) == FIRST_SIZE
    many = [shares.join(f"u{i}") for i in range(100)]
    assert shares.num_active == 101
    assert len({s.row for s in [stays, *many]}) == 101
    for standing in many:
        shares.leave(standing)
    for i in range(200):
        shares.leave(shares.join(f"v{i}"))
    assert len(shares) <= 8
    assert shares.find("stays") is stays


def test_a_row_that_is_reused_starts_at_the_clock():
    shares = some_shares(capacity=1)
    first = shares.join("first")
    for _ in range(7):
        shares.granted(first, 1.0)
    shares.leave(first)
    second = shares.join("second")
    assert second.row == first.row
    assert shares.virtual_s[second.row] == 6.0  # where the last grant began
    assert not shares.turn[second.row]
    assert np.count_nonzero(shares.virtual_s) == 1

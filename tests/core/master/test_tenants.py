"""Tenants' token rates: the bucket, corrections, the bounded table of accounts."""

from __future__ import annotations

import random

import pytest

from rtp.core.errors import ConfigError, IllegalMove
from rtp.core.master.tenants import BURST_S, Tenants, Terms

RATED = Terms(tokens_per_s=100.0, burst_tokens=1000.0)


@pytest.mark.parametrize("field", ["weight", "tokens_per_s", "burst_tokens", "max_waiting"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "abc", True])
def test_a01_terms_that_mean_nothing_are_an_error(field: str, value: object):
    with pytest.raises(ConfigError, match=field):
        Terms(**{"tokens_per_s": 1.0, field: value})


def test_a01_half_a_request_or_a_burst_without_a_rate_is_an_error():
    with pytest.raises(ConfigError, match="whole"):
        Terms(max_waiting=1.5)
    with pytest.raises(ConfigError, match="needs tokens_per_s"):
        Terms(burst_tokens=10.0)


def test_the_wait_is_what_the_bucket_lacks_over_its_rate():
    tenants = Tenants({"a": RATED})
    assert tenants.shortfall_s("a", 1000, 0.0) == 0.0
    tenants.charge("a", 900, 0.0)
    assert tenants.shortfall_s("a", 100, 0.0) == 0.0
    assert tenants.shortfall_s("a", 400, 0.0) == pytest.approx(3.0)
    assert tenants.shortfall_s("a", 400, 2.0) == pytest.approx(1.0)
    assert tenants.shortfall_s("a", 400, 3.0) == 0.0
    assert tenants.level("a", 100.0) == 1000.0, "no more than the burst is saved"


def test_a_request_larger_than_the_burst_passes_when_the_bucket_is_full_and_leaves_a_debt():
    tenants = Tenants({"a": RATED})
    assert tenants.shortfall_s("a", 5000, 0.0) == 0.0
    tenants.charge("a", 5000, 0.0)
    assert tenants.level("a", 0.0) == -4000.0
    assert tenants.shortfall_s("a", 1, 0.0) == pytest.approx(40.01)
    assert tenants.shortfall_s("a", 5000, 0.0) == pytest.approx(50.0)


def test_what_was_not_used_goes_back_and_what_was_used_beyond_is_owed():
    tenants = Tenants({"a": RATED})
    less, more, nothing = (tenants.charge("a", 300, 0.0) for _ in range(3))
    tenants.settle(less, 100, 0.0)
    assert tenants.level("a", 0.0) == 300.0
    tenants.settle(more, 500, 0.0)
    assert tenants.level("a", 0.0) == 100.0
    tenants.settle(nothing, 0, 0.0)
    assert tenants.level("a", 0.0) == 400.0
    assert (tenants.usage["a"].admitted, tenants.usage["a"].used_tokens) == (3, 600)
    assert tenants.num_open == 0


def test_what_goes_back_late_never_lifts_the_bucket_over_its_burst():
    tenants = Tenants({"a": RATED})
    charge = tenants.charge("a", 300, 0.0)
    tenants.settle(charge, 0, 60.0)
    assert tenants.level("a", 60.0) == 1000.0


def test_a_charge_is_settled_once():
    tenants = Tenants()
    charge = tenants.charge("a", 10, 0.0)
    tenants.settle(charge, 10, 0.0)
    with pytest.raises(IllegalMove, match="twice"):
        tenants.settle(charge, 10, 0.0)


def test_over_any_time_a_tenant_uses_its_burst_and_rate_and_no_more():
    rng = random.Random(1)
    tenants, used, now = Tenants({"a": RATED}), 0, 0.0
    for _ in range(2000):
        now += rng.random() * 0.5
        tokens = rng.randrange(1, 300)
        if tenants.shortfall_s("a", tokens, now) == 0.0:
            tenants.settle(tenants.charge("a", tokens, now), tokens, now)
            used += tokens
        assert used <= 1000 + 100 * now + 1e-6
    assert used > 0.95 * 100 * now, "and it gets what it is granted"


def test_without_a_rate_nothing_is_short_and_use_is_still_counted():
    tenants = Tenants({"a": Terms(weight=3.0)})
    for tenant in ("a", "b"):
        tenants.settle(tenants.charge(tenant, 1e12, 0.0), 5, 0.0)
        assert tenants.shortfall_s(tenant, 1e12, 0.0) == 0.0
    assert tenants.usage["a"].used_tokens == tenants.others.used_tokens == 5
    assert (tenants.weight("a"), tenants.weight("b")) == (3.0, 1.0)


def test_a_burst_that_is_not_given_is_some_seconds_of_the_rate():
    assert Terms(tokens_per_s=50.0).burst == 50.0 * BURST_S


def test_tenants_without_a_name_in_the_settings_have_a_bucket_each():
    tenants = Tenants(default=RATED)
    tenants.charge("a", 1000, 0.0)
    assert tenants.shortfall_s("a", 100, 0.0) == 1.0
    assert tenants.shortfall_s("b", 100, 0.0) == 0.0


def test_accounts_are_bounded_by_count_and_age_and_a_debt_is_not_forgotten():
    tenants = Tenants(default=RATED, capacity=10, age_s=100.0)
    for i in range(1000):
        tenants.settle(tenants.charge(f"t{i}", 1, i * 0.1), 1, i * 0.1)
    assert len(tenants) == 10
    assert set(tenants.usage) == set(), "no name is kept in a counter"
    assert tenants.others.admitted == 1000
    tenants.charge("debtor", 100_000, 100.0)
    for i in range(2000):
        tenants.settle(tenants.charge(f"u{i}", 1, 101 + i * 0.1), 1, 101 + i * 0.1)
    assert len(tenants) <= 10
    assert tenants.shortfall_s("debtor", 100, 301.1) > 100.0
    tenants.charge("late", 1, 5000.0)
    for i in range(10):
        tenants.charge(f"v{i}", 1, 5001.0)
    assert len(tenants) == 10


def test_when_every_account_is_in_use_further_tenants_share_one():
    tenants = Tenants({"named": RATED}, RATED, capacity=2)
    for tenant in ("a", "b"):
        tenants.charge(tenant, 10, 0.0)
    shared = tenants.charge("c", 1000, 0.0)
    assert tenants.shortfall_s("d", 100, 0.0) == 1.0
    tenants.settle(shared, 0, 0.0)
    assert tenants.shortfall_s("d", 100, 0.0) == 0.0
    assert tenants.num_open == 2

"""What each tenant may use: tokens per second with a burst, waiting requests, a share of service.

Tokens are prompt tokens to compute and output tokens. A request is charged what it is expected to
take when it is admitted, and what it did take in the end: the difference goes back, or into debt. A
request larger than the burst passes when the bucket is full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite

from rtp.core.errors import ConfigError, IllegalMove

BURST_S = 10.0
"""A burst that is not given: what the rate allows in so long."""
MOST_TRIES = 4
"""Accounts looked at to make room for a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a tenant is granted; None is no limit. Raises ConfigError for what means nothing."""

    weight: float = 1.0
    """Its share of service while several tenants wait, relative to the others'."""
    tokens_per_s: float | None = None
    burst_tokens: float | None = None
    """Tokens it may use at once after a pause. Default: BURST_S seconds of its rate."""
    max_waiting: int | None = None
    """Requests that may wait for a rank of one model."""

    def __post_init__(self) -> None:
        for name in ("weight", "tokens_per_s", "burst_tokens", "max_waiting"):
            value = getattr(self, name)
            if value is None and name != "weight":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and isfinite(value) and value > 0):
                raise ConfigError(f"a tenant's {name} must be a positive number, not {value!r}")
        if self.max_waiting is not None and not isinstance(self.max_waiting, int):
            raise ConfigError(f"a tenant's max_waiting must be whole, not {self.max_waiting!r}")
        if self.burst_tokens is not None and self.tokens_per_s is None:
            raise ConfigError("a tenant's burst_tokens needs tokens_per_s")

    @property
    def rate(self) -> float:
        return inf if self.tokens_per_s is None else self.tokens_per_s

    @property
    def burst(self) -> float:
        return BURST_S * self.rate if self.burst_tokens is None else self.burst_tokens


@dataclass(slots=True)
class Usage:
    """Counters since the start."""

    admitted: int = 0
    refused: int = 0
    """By its own limits."""
    used_tokens: float = 0.0
    """Of requests that ended."""


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's bucket. Changed by Tenants only."""

    terms: Terms
    usage: Usage
    level: float
    """Tokens it may use, at `filled_at`; below zero it owes some."""
    filled_at: float
    open: int = 0
    """Charges not settled."""


@dataclass(slots=True, eq=False)
class Charge:
    """What one attempt was charged; hangs on it until settled, once."""

    account: Account
    tokens: float
    open: bool = field(default=True)


class Tenants:
    """charge() what is admitted, settle() it once when it ends, however it ends.

    At most `capacity` accounts are kept, each until `age_s` after its last use. A tenant for whom
    there is no room while all others are in use shares one account with its like.
    """

    def __init__(
        self,
        terms: Mapping[str, Terms] | None = None,
        default: Terms | None = None,
        *,
        capacity: int = 4096,
        age_s: float = 3600.0,
    ) -> None:
        """terms: of named tenants; all others have an account each under `default`."""
        self._terms = dict(terms or {})
        self._default = default or Terms()
        self._capacity = capacity
        self._age_s = age_s
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self.usage = {name: Usage() for name in self._terms}
        """By named tenant."""
        self.others = Usage()
        """Of all tenants without a name in the settings."""
        self._shared = Account(self._default, self.others, self._default.burst, 0.0)

    def __len__(self) -> int:
        return len(self._accounts)

    def terms(self, tenant: str) -> Terms:
        return self._terms.get(tenant, self._default)

    def weight(self, tenant: str) -> float:
        return self.terms(tenant).weight

    def shortfall_s(self, tenant: str, tokens: float, now: float) -> float:
        """Seconds until a request of so many tokens may pass; 0: now."""
        terms = self.terms(tenant)
        if terms.rate == inf:
            return 0.0
        missing = min(tokens, terms.burst) - _level(self._account(tenant, now), now)
        return max(0.0, missing / terms.rate)

    def charge(self, tenant: str, tokens: float, now: float) -> Charge:
        """Takes what a request is expected to use, whether or not the bucket holds it."""
        account = self._account(tenant, now)
        _take(account, tokens, now)
        account.open += 1
        account.usage.admitted += 1
        return Charge(account, tokens)

    def settle(self, charge: Charge, used: float, now: float) -> None:
        """The attempt ended: of its charge what was not used goes back. Raises IllegalMove the
        second time."""
        if not charge.open:
            raise IllegalMove("a tenant's charge is settled twice")
        charge.open = False
        account = charge.account
        account.open -= 1
        account.usage.used_tokens += used
        _take(account, used - charge.tokens, now)

    def refused(self, tenant: str) -> None:
        self.usage.get(tenant, self.others).refused += 1

    def level(self, tenant: str, now: float) -> float:
        """Tokens the tenant may use now; negative: it owes them; infinite without a rate."""
        account = self._accounts.get(tenant)
        return self.terms(tenant).burst if account is None else _level(account, now)

    @property
    def num_open(self) -> int:
        """Charges not settled. O(accounts)."""
        return self._shared.open + sum(account.open for account in self._accounts.values())

    # ------------------------------------------------------------ the bounded table

    def _account(self, tenant: str, now: float) -> Account:
        """The tenant's own, made if there is room for it; else the shared one."""
        account = self._accounts.get(tenant)
        if account is not None:
            self._accounts.move_to_end(tenant)
            return account
        self._forget(now)
        if len(self._accounts) >= self._capacity:
            return self._shared
        terms = self.terms(tenant)
        usage = self.usage.get(tenant, self.others)
        account = self._accounts[tenant] = Account(terms, usage, terms.burst, now)
        return account

    def _forget(self, now: float) -> None:
        """Takes out accounts that say nothing: no open charge, a full bucket. The longest unused
        stand in front; one that has to stay goes behind."""
        for _ in range(MOST_TRIES):
            if not self._accounts:
                return
            tenant, account = next(iter(self._accounts.items()))
            full = len(self._accounts) >= self._capacity
            if not full and now - account.filled_at <= self._age_s:
                return
            if account.open or _level(account, now) < account.terms.burst:
                self._accounts.move_to_end(tenant)
            else:
                del self._accounts[tenant]


def _level(account: Account, now: float) -> float:
    terms = account.terms
    if terms.tokens_per_s is None:
        return inf
    return min(terms.burst, account.level + (now - account.filled_at) * terms.rate)


def _take(account: Account, tokens: float, now: float) -> None:
    """Negative tokens go back; never more than the burst. Without a rate there is no bucket."""
    if account.terms.tokens_per_s is not None:
        account.level = min(account.terms.burst, _level(account, now) - tokens)
    account.filled_at = now

"""The limits one request has to pass: queue, predicted time to first token, its tenant's terms.

Full queues are shared like service: a tenant under its share of one is let in, and the newest
request of the tenant most over its own makes way. So a flood fills the queue for its sender only.
"""

from __future__ import annotations

from math import inf

from rtp.core.master.admission import Admission
from rtp.core.master.pool import Pool
from rtp.core.master.ranks import Ranks
from rtp.core.master.shares import Standing
from rtp.core.master.tenants import Tenants
from rtp.core.master.window import Waiting
from rtp.core.messages import Ask, Refuse


class Limits:
    """refusal() before a request is let in; in_the_way() until nothing is."""

    def __init__(self, ranks: Ranks, admission: Admission, tenants: Tenants) -> None:
        self._ranks = ranks
        self._gates = admission
        self._tenants = tenants

    def refusal(
        self, ask: Ask, pool: Pool, uncached: int, need: int, service_s: float, now: float
    ) -> Refuse | None:
        """uncached, need: prompt tokens to compute; these and the expected output, which is what
        its tenant is charged. service_s: predicted for its prefill."""
        gates, terms = self._gates, self._tenants.terms(ask.tenant)
        if not gates.limits:
            return None
        ttft_limit_s = gates.ttft_limit_s(ask)
        standing = pool.window.shares.find(ask.tenant)
        num_waiting = standing.num_waiting if standing else 0
        crowded = terms.max_waiting is not None and num_waiting >= terms.max_waiting
        gate = self._excess(pool, uncached)
        if gate and self._under_share(ask, pool, uncached, standing):
            gate = ""
        wait_s = self._tenants.shortfall_s(ask.tenant, need, now)
        if not (crowded or gate or wait_s or ttft_limit_s < inf):
            return None  # nearly always, and no array was touched
        drain_s = self._drain_s(ask, pool, standing, now)
        if crowded:
            return gates.tenant_queue(ask, num_waiting, drain_s)
        if gate:
            return gates.queue_full(ask, gate, drain_s)
        if drain_s + service_s > ttft_limit_s:
            return gates.too_late(ask, drain_s + service_s, ttft_limit_s, drain_s)
        return gates.tenant_rate(ask, terms, need, wait_s) if wait_s else None

    def by_prompt(self, ask: Ask) -> bool:
        """Whether it matters to its limits how long its prefill takes; what does not wait is
        matched for its place in any case, in this very turn."""
        rate = self._tenants.terms(ask.tenant).tokens_per_s
        return rate is not None or self._gates.ttft_limit_s(ask) < inf

    def in_the_way(self, pool: Pool, uncached: int) -> Waiting | None:
        """A waiting request that a further one pushes out of the queue; None when it has room, or
        what is newest has run before: streams that a lost worker cut are not refused."""
        gate = self._excess(pool, uncached)
        if not gate:
            return None
        shares = pool.window.shares
        most = shares.most_over(_requests if gate == "queue_requests" else _tokens)
        newest = pool.window.newest_of(most) if most else None
        return newest if newest is not None and newest.ask.attempt == 1 else None

    def pool_drain_s(self, pool: Pool) -> float:
        """Predicted seconds until all that waits has been placed."""
        return pool.window.service_s / max(1, len(pool.lanes))

    def _drain_s(self, ask: Ask, pool: Pool, standing: Standing | None, now: float) -> float:
        """Predicted wait of one more request: until a rank is free, and until its tenant's backlog
        is served at its share, or at last when all of it is."""
        own_s = standing.service_s if standing else 0.0
        at_share_s = own_s / pool.window.shares.share(ask.tenant) / max(1, len(pool.lanes))
        wait_s = 0.0
        if len(pool.lanes):
            wait_s = max(0.0, float(self._ranks.busy_s(pool.lanes, now).min()))
        return wait_s + min(self.pool_drain_s(pool), at_share_s)

    def _excess(self, pool: Pool, uncached: int) -> str:
        window = pool.window
        return self._gates.excess(
            requests=window.num_waiting, tokens=window.num_tokens, uncached=uncached
        )

    def _under_share(self, ask: Ask, pool: Pool, uncached: int, standing: Standing | None) -> bool:
        """Whether it would stay within its tenant's share of both limits of the queue."""
        share = pool.window.shares.share(ask.tenant)
        requests = standing.num_waiting if standing else 0
        tokens = standing.num_tokens if standing else 0
        return (
            requests + 1 <= share * self._gates.max_requests
            and tokens + uncached <= share * self._gates.max_tokens
        )


def _requests(standing: Standing) -> float:
    return standing.num_waiting


def _tokens(standing: Standing) -> float:
    return standing.num_tokens

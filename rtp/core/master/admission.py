"""Gates a new request passes before it may wait. Each has a name, a reason and a counter.

What can never fit, a model nobody serves, a passed deadline are facts and always checked; the
limits (queue, predicted time to first token, those of tenants) can be switched off together.
"""

from __future__ import annotations

from math import ceil, inf

from rtp.core.errors import ConfigError
from rtp.core.master.tenants import Terms
from rtp.core.messages import Ask, Refuse

GATES = (
    "context_length",
    "kv_capacity",
    "model_not_found",
    "no_worker",
    "queue_requests",
    "queue_tokens",
    "queue_share",
    "predicted_ttft",
    "no_room",
    "deadline",
    "tenant_queue",
    "tenant_rate",
)
LEAST_RETRY_S = 1.0
MOST_RETRY_S = 60.0
MOST_BUCKET_S = 3600.0
"""A bucket's own time is told as it is, up to this."""
FULL = "rate_limit_exceeded"


class Admission:
    """One method per gate; each returns the Refuse or None and counts what it refuses."""

    def __init__(
        self,
        *,
        max_queue_requests: int,
        max_queue_tokens: int,
        ttft_limit_s: float | None,
        limits: bool,
    ) -> None:
        """limits: False switches off the gates of queue, TTFT and tenants. Raises ConfigError for
        limits that would refuse everything or mean nothing."""
        for name, value in (
            ("max_queue_requests", max_queue_requests),
            ("max_queue_tokens", max_queue_tokens),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        if ttft_limit_s is not None and not (
            isinstance(ttft_limit_s, int | float) and 0 < ttft_limit_s < float("inf")
        ):
            raise ConfigError(f"ttft_limit_s must be positive seconds, not {ttft_limit_s!r}")
        self.max_requests = max_queue_requests
        self.max_tokens = max_queue_tokens
        self._ttft_limit_s = ttft_limit_s
        self.limits = limits
        self.counts = dict.fromkeys(GATES, 0)
        """Refusals by gate, since the start."""

    def unknown_model(self, ask: Ask) -> Refuse:
        return self._refuse(
            ask, "model_not_found", 404, "model_not_found", f"no worker serves {ask.model[:200]!r}"
        )

    def no_worker(self, ask: Ask) -> Refuse:
        return self._refuse(
            ask,
            "no_worker",
            503,
            "service_unavailable",
            "no worker for this model is alive",
            LEAST_RETRY_S,
        )

    def no_room(self, ask: Ask) -> Refuse:
        reason = "no worker has room now, and the request does not wait"
        return self._refuse(ask, "no_room", 503, "overloaded", reason, LEAST_RETRY_S)

    def deadline_passed(self, ask: Ask) -> Refuse:
        return self._refuse(
            ask, "deadline", 504, "timeout", "the deadline passed before a worker was free"
        )

    def never_fits(self, ask: Ask, max_model_len: int, kv_total: float) -> Refuse | None:
        """max_model_len, kv_total: the largest any rank of the model offers, in tokens."""
        code = "context_length_exceeded"
        if ask.num_tokens + ask.max_tokens > max_model_len:
            return self._refuse(
                ask,
                "context_length",
                400,
                code,
                f"{ask.num_tokens} prompt tokens and {ask.max_tokens} output tokens exceed "
                f"the model's context of {max_model_len}",
            )
        least = ask.num_tokens + ask.n * min(ask.max_tokens, 1)
        if least > kv_total:
            return self._refuse(
                ask,
                "kv_capacity",
                400,
                code,
                f"{ask.num_tokens} prompt tokens do not fit the cache of any worker "
                f"({kv_total:.0f} tokens)",
            )
        return None

    def excess(self, *, requests: int, tokens: int, uncached: int) -> str:
        """The gate of the queue limits that one more request meets; "" where it meets none.

        requests, tokens: waiting now. One request is never too large for an empty queue.
        """
        if not self.limits:
            return ""
        if requests >= self.max_requests:
            return "queue_requests"
        return "queue_tokens" if tokens and tokens + uncached > self.max_tokens else ""

    def queue_full(self, ask: Ask, gate: str, drain_s: float) -> Refuse:
        """drain_s: predicted seconds until what waits has been placed; told as Retry-After."""
        limit = self.max_requests if gate == "queue_requests" else self.max_tokens
        what = "requests" if gate == "queue_requests" else "prompt tokens"
        reason = f"the queue is full; its limit is {limit} {what}"
        return self._refuse(ask, gate, 429, FULL, reason, _retry_s(drain_s))

    def displaced(self, ask: Ask, drain_s: float) -> Refuse:
        """It waited, and makes way for a tenant that has less than its share of a full queue."""
        reason = "the queue is full, and this tenant has more than its share of it"
        return self._refuse(ask, "queue_share", 429, FULL, reason, _retry_s(drain_s))

    def ttft_limit_s(self, ask: Ask) -> float:
        """The request's own or everybody's, whichever is less; infinite without any."""
        own = ask.ttft_timeout_s
        return min(inf if own is None else own, self._ttft_limit_s or inf)

    def too_late(self, ask: Ask, ttft_s: float, limit_s: float, drain_s: float) -> Refuse:
        """ttft_s: predicted seconds until its first token."""
        reason = f"the first token is predicted in {ttft_s:.2f} s; the limit is {limit_s:g}"
        return self._refuse(ask, "predicted_ttft", 503, "overloaded", reason, _retry_s(drain_s))

    def tenant_queue(self, ask: Ask, num_waiting: int, drain_s: float) -> Refuse:
        """num_waiting: requests of its tenant, which may not have more."""
        reason = f"{num_waiting} requests of this tenant wait, and no more may"
        return self._refuse(ask, "tenant_queue", 429, FULL, reason, _retry_s(drain_s))

    def tenant_rate(self, ask: Ask, terms: Terms, tokens: int, wait_s: float) -> Refuse:
        """tokens: what the request counts. wait_s: until its tenant's bucket holds them."""
        reason = (
            f"the request counts {tokens} tokens; this tenant has used its {terms.rate:g} tokens"
            f" per second and its burst of {terms.burst:g}"
        )
        retry_s = float(ceil(min(max(wait_s, LEAST_RETRY_S), MOST_BUCKET_S)))
        return self._refuse(ask, "tenant_rate", 429, FULL, reason, retry_s)

    def _refuse(
        self, ask: Ask, gate: str, status: int, code: str, reason: str, retry_s: float | None = None
    ) -> Refuse:
        self.counts[gate] += 1
        return Refuse(ask.request_id, ask.attempt, status, code, reason, retry_s)


def _retry_s(seconds: float) -> float:
    return float(ceil(min(max(seconds, LEAST_RETRY_S), MOST_RETRY_S)))

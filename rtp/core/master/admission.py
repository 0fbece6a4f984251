"""Gates a new request passes before it may wait. Each has a name, a reason and a counter.

What can never fit, a model nobody serves, a passed deadline are facts and always checked; the
limits (queue, predicted time to first token) can be switched off together.
"""

from __future__ import annotations

from math import ceil

from rtp.core.errors import ConfigError
from rtp.core.messages import Ask, Refuse

GATES = (
    "context_length",
    "kv_capacity",
    "model_not_found",
    "no_worker",
    "queue_requests",
    "queue_tokens",
    "predicted_ttft",
    "no_room",
    "deadline",
)
LEAST_RETRY_S = 1.0
MOST_RETRY_S = 60.0


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
        """limits: False switches off the queue and TTFT gates. Raises ConfigError for limits that
        would refuse everything or mean nothing."""
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
        self._max_requests = max_queue_requests
        self._max_tokens = max_queue_tokens
        self._ttft_limit_s = ttft_limit_s
        self._limits = limits
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

    def too_much(
        self, ask: Ask, *, requests: int, tokens: int, uncached: int, ttft_s: float, drain_s: float
    ) -> Refuse | None:
        """The limits. requests, tokens: waiting now. ttft_s: predicted for this one. drain_s:
        predicted seconds until what waits has been placed; told as Retry-After."""
        if not self._limits:
            return None
        retry_s = float(ceil(min(max(drain_s, LEAST_RETRY_S), MOST_RETRY_S)))
        full = "rate_limit_exceeded"
        if requests >= self._max_requests:
            reason = f"{requests} requests wait; the limit is {self._max_requests}"
            return self._refuse(ask, "queue_requests", 429, full, reason, retry_s)
        if tokens and tokens + uncached > self._max_tokens:
            reason = f"{tokens} prompt tokens wait; the limit is {self._max_tokens}"
            return self._refuse(ask, "queue_tokens", 429, full, reason, retry_s)
        limits = [x for x in (self._ttft_limit_s, ask.ttft_timeout_s) if x is not None]
        if limits and ttft_s > min(limits):
            reason = f"the first token is predicted in {ttft_s:.2f} s; the limit is {min(limits):g}"
            return self._refuse(ask, "predicted_ttft", 503, "overloaded", reason, retry_s)
        return None

    def _refuse(
        self, ask: Ask, gate: str, status: int, code: str, reason: str, retry_s: float | None = None
    ) -> Refuse:
        self.counts[gate] += 1
        return Refuse(ask.request_id, ask.attempt, status, code, reason, retry_s)

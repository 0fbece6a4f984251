"""A user's routing policy under a stop-watch: one that is slow holds up the whole Master."""

from __future__ import annotations

import time
from collections.abc import Callable

from rtp.core.errors import RtpError
from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray

LIMIT_S = 0.005
STRIKES = 3
"""Slow calls in a row; one alone may be the machine's doing."""
REST_S = 10.0


class PolicyTooSlow(RtpError):
    """A routing policy took too long too often and is left out for a while."""


class Watched:
    """The policy, until STRIKES calls in a row took LIMIT_S. Then it rests for REST_S: each call
    raises PolicyTooSlow, so that the Master falls back and counts it."""

    def __init__(self, policy: Routing, clock: Callable[[], float] = time.monotonic) -> None:
        self.holds = bool(getattr(policy, "holds", False))
        self.by_row = bool(getattr(policy, "by_row", False))
        self.monotone = bool(getattr(policy, "monotone", False))
        self._policy = policy
        self._clock = clock
        self._strikes = 0
        self._rests_until = 0.0
        self._reason = ""

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        start = self._clock()
        if start < self._rests_until:
            raise PolicyTooSlow(self._reason)
        scores = self._policy.score(query, candidates, predict)
        took_s = self._clock() - start
        self._strikes = self._strikes + 1 if took_s > LIMIT_S else 0
        if self._strikes == STRIKES:
            self._strikes = 0
            self._rests_until = start + took_s + REST_S
            self._reason = (
                f"{STRIKES} decisions in a row took over {1000 * LIMIT_S:g} ms;"
                f" it is left out for {REST_S:g} s"
            )
        return scores

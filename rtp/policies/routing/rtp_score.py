"""The RTP-LLM paper's score: what a rank holds, what it could pull, and how late it would be.

arXiv 2605.29639, section 5.2.5. In shares of the prompt and of the worst candidate's latency:

    alpha * local / total + beta * remote / total - gamma * latency / max_latency

The paper publishes no weights. Scaling all three alike changes nothing, so only ratios matter; and
since remote is what lies beyond local, what decides is (alpha - beta) / gamma. On a public
conversation trace alpha / gamma was best at 0.1 with the trace's own rate, at 0.25 with 1.5 times
and at 1 with 1.75 times that: the scarcer the compute, the more a hit is worth. The defaults make
(alpha - beta) / gamma 0.25.

Left out: the cost of pulling, which the paper's formula does not have either.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from rtp.core.errors import ConfigError
from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray

ALPHA, BETA, GAMMA = 0.3, 0.05, 1.0
SMALLEST_S = 1e-9


@dataclass(frozen=True, slots=True)
class RtpScore:
    alpha: float
    beta: float
    gamma: float
    literal: bool
    """The longest match anywhere is every rank's remote match, as printed: beta decides nothing."""

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        local = candidates.matched_tokens
        own = np.zeros(len(local)) if self.literal else local
        remote = candidates.best_tokens - own
        latency_s = candidates.wait_s + predict.prefill_s(query.num_tokens - local, local)
        share = latency_s / max(float(latency_s.max()), SMALLEST_S)
        held = self.alpha * local + self.beta * remote
        return held / query.num_tokens - self.gamma * share


def build(
    alpha: float = ALPHA, beta: float = BETA, gamma: float = GAMMA, literal: bool = False
) -> Routing:
    if not (0 <= beta < alpha < inf and 0 <= gamma < inf):
        raise ConfigError(
            "rtp_score takes finite 0 <= beta < alpha and gamma >= 0,"
            f" not alpha={alpha}, beta={beta}, gamma={gamma}"
        )
    return RtpScore(alpha, beta, gamma, literal)

"""The rank that holds most of the prompt, unless it carries clearly more than its share.

Without the bound a head that all prompts share would send everything to the rank that saw it first.
With it that rank fills up to its bound, and the next one computes the head, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from rtp.core.errors import ConfigError
from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray

SPREAD = 1.25
"""As in consistent hashing with bounded loads (arXiv 1608.01350)."""
OVER = -1.0


@dataclass(frozen=True, slots=True)
class PrefixAffinity:
    spread: float
    """A rank may carry this many times the mean, and one prompt like this one."""

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        """Tokens matched; below zero where the load, in tokens as in least_loaded, is over the
        bound. No hit is a tie, which the caller gives to the chat's rank, then the least loaded."""
        load = candidates.prefill_tokens + candidates.context_tokens
        within = load <= self.spread * load.mean() + query.num_tokens
        return np.where(within, candidates.matched_tokens, OVER)


def build(spread: float = SPREAD) -> Routing:
    if not 1 <= spread < inf:
        raise ConfigError(f"prefix_affinity takes a finite spread of 1 or more, not {spread}")
    return PrefixAffinity(spread)

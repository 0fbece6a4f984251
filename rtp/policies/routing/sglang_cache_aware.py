"""What sglang-router 0.3.2 computes as `cache_aware`, with its defaults.

Requests in flight are out of balance when they differ by more than 64 and the most is over 1.5
times the least: then the least busy rank. Otherwise the holder of the longest match, where that is
more than 0.3 of the prompt, or else the rank whose cache is smallest. On a public conversation
trace 0.5, 32 and 1.0001 did better.

Left out: its tree of characters, sent rather than held, capped and swept by time (matches here are
tokens that ranks report); the size of a worker's tree (here the tokens in use in its pool); workers
with no room, which are no candidates and do not count in the balance. Equal holders are told apart
by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from rtp.core.errors import ConfigError
from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray

CACHE_THRESHOLD = 0.3
BALANCE_ABS = 64.0
BALANCE_REL = 1.5


@dataclass(frozen=True, slots=True)
class SglangCacheAware:
    cache_threshold: float
    balance_abs: float
    balance_rel: float

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        """Minus requests, tokens matched, or minus tokens in use."""
        num, matched = candidates.num_requests, candidates.matched_tokens
        least, most = num.min(), num.max()
        if most - least > self.balance_abs and most > self.balance_rel * least:
            return -num
        if matched.max() > self.cache_threshold * query.num_tokens:
            return matched
        return candidates.kv_free - candidates.kv_total


def build(
    cache_threshold: float = CACHE_THRESHOLD,
    balance_abs: float = BALANCE_ABS,
    balance_rel: float = BALANCE_REL,
) -> Routing:
    if not (0 <= cache_threshold <= 1 and 0 <= balance_abs < inf and 1 <= balance_rel < inf):
        raise ConfigError(
            "sglang_cache_aware takes cache_threshold in 0..1, balance_abs >= 0, balance_rel >= 1,"
            f" not {cache_threshold}, {balance_abs}, {balance_rel}"
        )
    return SglangCacheAware(cache_threshold, balance_abs, balance_rel)

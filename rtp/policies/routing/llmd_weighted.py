"""What llm-d's endpoint picker computes, with the weights of its guide (2, 2, 1), by its docs.

A sum of weighted scores in 0..1: the share of the prompt's blocks that are held; the queue, from 1
at the shortest to 0 at the longest; the free share of the pool. Red Hat ships 3, 2, 0; on a public
conversation trace 2, 1, 0 did best. Equal sums are drawn from evenly: by seed and decision number.

Left out: the scorer that spreads cold prompts, entries made on dispatch for two seconds (a grant's
load is charged at once here), and latency prediction. A queue is the requests that do not decode.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import inf

import numpy as np

from rtp.core.errors import ConfigError
from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray

PREFIX, QUEUE, KV = 2.0, 2.0, 1.0
TIE = 1e-6
"""The caller rounds to this: a smaller difference is none."""


@dataclass(frozen=True, slots=True)
class LlmdWeighted:
    prefix: float
    queue: float
    kv: float
    seed: int

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        """The weighted sum; its best are raised by their draws."""
        c = candidates
        held = c.matched_tokens / (max(query.num_blocks, 1) * query.block_size)
        waiting = np.maximum(c.num_requests - c.decode_rows, 0.0)
        short = (waiting.max() - waiting) / max(float(np.ptp(waiting)), 1.0)
        free = c.kv_free / np.maximum(c.kv_total, 1.0)
        total: FloatArray = self.prefix * held + self.queue * short + self.kv * free
        draw = np.random.default_rng((self.seed, query.number)).random(len(total))
        return np.where(total > total.max() - TIE, total + draw, total)


def build(prefix: float = PREFIX, queue: float = QUEUE, kv: float = KV, seed: int = 0) -> Routing:
    policy = LlmdWeighted(prefix, queue, kv, seed)
    if not (isinstance(seed, int) and all(0 <= value < inf for value in astuple(policy))):
        raise ConfigError(
            f"llmd_weighted takes finite weights from 0 up and a whole seed, not {policy}"
        )
    return policy

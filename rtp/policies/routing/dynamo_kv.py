"""What Dynamo's KV router computes (ai-dynamo-runtime 1.6.1), with its defaults. In blocks:

    prefill_scale * max(0, (prefill left + prompt) / block_size - credit)
        + decode_scale * blocks decoded from, this prompt's included
        + request_weight * requests

The lowest cost wins. credit is overlap_weight * blocks on the device, and 0.75 of those that only
the host tier has. Equal costs are drawn from evenly: by seed and decision number. On a public
conversation trace it did best with decode_scale 0.

Left out: credit for disk and for a shared pool (no such columns), for both at once in a pool of
decode ranks, its discount of credit where prefills pile up (off by default), temperature above 0,
queueing when all are busy, and sharing of blocks among decodes, so that decode_scale, which it does
not have, counts every context whole.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import inf

import numpy as np

from rtp.core.errors import ConfigError
from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray

HOST_CREDIT = 0.75
TIE = 1e-6
"""The caller rounds to this: a smaller difference is none."""


@dataclass(frozen=True, slots=True)
class DynamoKv:
    overlap_weight: float
    prefill_scale: float
    decode_scale: float
    request_weight: float
    seed: int

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        c, prompt = candidates, query.num_tokens
        beyond = np.maximum(c.host_tokens - c.matched_tokens, 0.0)
        credit = self.overlap_weight * c.matched_tokens + HOST_CREDIT * beyond
        prefill = np.maximum(c.prefill_tokens + prompt - credit, 0.0)
        decode = c.context_tokens + prompt
        tokens = self.prefill_scale * prefill + self.decode_scale * decode
        cost = tokens / query.block_size + self.request_weight * c.num_requests
        draw = np.random.default_rng((self.seed, query.number)).random(len(cost))
        return np.where(cost < cost.min() + TIE, draw, 0.0) - cost


def build(
    overlap_weight: float = 1.0,
    prefill_scale: float = 1.0,
    decode_scale: float = 1.0,
    request_weight: float = 0.0,
    seed: int = 0,
) -> Routing:
    policy = DynamoKv(overlap_weight, prefill_scale, decode_scale, request_weight, seed)
    if not (isinstance(seed, int) and all(0 <= value < inf for value in astuple(policy))):
        raise ConfigError(
            f"dynamo_kv takes finite numbers from 0 up and a whole seed, not {policy}"
        )
    return policy

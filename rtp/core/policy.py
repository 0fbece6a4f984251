"""Protocols of the choices users may plug in. A policy is arithmetic on columns: no I/O, no
clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from rtp.core.types import BoolArray, FloatArray, IntArray

TABLE = (
    *("matched_tokens", "wait_s", "prefill_tokens", "num_requests", "decode_rows"),
    *("context_tokens", "kv_free", "kv_total"),
)
"""Columns of Candidates.table, in its order."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The ranks one request could go to, as it sees them at one instant.

    Arrays of length R, same row, same rank; rows in ascending rank_ids. Tokens, seconds. They are
    made when first read, are read-only, and hold for this call only.
    """

    rank_ids: IntArray
    matched_tokens: FloatArray  # longest prefix held on the rank's device tier, from token 0
    host_tokens: FloatArray  # longest prefix held on device or host tier, >= matched_tokens
    best_tokens: float  # longest prefix held anywhere, these ranks or not
    wait_s: FloatArray  # predicted wait until its prefill could start
    prefill_tokens: FloatArray  # uncached prompt tokens granted and not yet computed
    num_requests: FloatArray  # running, waiting and granted
    decode_rows: FloatArray
    context_tokens: FloatArray  # tokens in the pages of the decode rows
    kv_free: FloatArray  # tokens
    kv_total: FloatArray  # tokens
    affine: BoolArray  # served this chat before

    @property
    def table(self) -> FloatArray:
        """[len(TABLE), R]: these columns as one array, for a policy that is a kernel: an array more
        costs a call more than a row of it."""
        return np.array([getattr(self, name) for name in TABLE], dtype=np.float64)


class Query(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a policy may know of the request."""

    num_tokens: int
    max_tokens: int
    num_blocks: int
    block_size: int
    priority: int
    number: int
    """Count of decisions made so far by this Master; a deterministic source for rotation and
    seeds."""
    expected_output: int
    """Tokens one choice of it is expected to produce."""
    backlog_s: float = 0.0
    """Predicted prefill seconds of all other requests that wait, over the ranks they wait for; 0
    while the Master is at its own limit."""


class Predict(Protocol):
    """Seconds, from the Master's predictor; arguments broadcast, columns in, columns out."""

    @property
    def coefficients(self) -> FloatArray:
        """[6, R], or [6, 1] where all ranks are alike: a, b, c of a prefill, d, e, f of a decode
        step, for a policy that does its own arithmetic. Read-only."""
        ...

    def prefill_s(self, new: FloatArray, cached: FloatArray) -> FloatArray: ...

    def decode_s(self, batch: FloatArray, context: FloatArray) -> FloatArray: ...


class Routing(Protocol):
    """Where a request goes. `build(**params)` of a module in policies/routing makes one."""

    def score(self, query: Query, candidates: Candidates, predict: Predict) -> FloatArray:
        """[R], highest wins; ties go to the least loaded, then to the lowest rank id. Scores in
        seconds are rounded to microseconds by the caller."""
        ...

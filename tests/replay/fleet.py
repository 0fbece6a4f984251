"""The fleet on which traces are replayed: Llama-2-70B on 8xA100, prefill only.

Seconds of a prefill: 7 ms + 111 us per new token + 2.1e-9 * new * (total - new/2), one prompt at a
time on each rank; caches without an end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rtp.backends import sim
from rtp.core import plugins
from rtp.core.policy import Routing
from rtp.core.replay import Fleet, Replayed, replay
from rtp.core.trace import TraceRow
from rtp.core.types import FloatArray

NUM_RANKS = 8
BLOCK_SIZE = 512
LONGEST = 200_000
PREFILL = {"a": 7e-3, "b": 111e-6, "c": 2.1e-9}
DECODE = {"d": 20e-3, "e": 1e-3, "f": 1e-7}


def prefill_only(
    rows: Sequence[TraceRow],
    routing: Routing | None = None,
    *,
    speed: float = 1.0,
    early: bool = False,
) -> Replayed:
    """routing: rtp's default where none is given."""
    num_blocks = sum(len(row.block_ids) for row in rows) + LONGEST // BLOCK_SIZE
    fleet = Fleet(
        runner=lambda: sim.build(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST,
            contents=False,
            **PREFILL,
            **DECODE,
        ),
        profile=(*PREFILL.values(), *DECODE.values()),
        workers=NUM_RANKS,
        max_batch_tokens=LONGEST,
        max_rows=1,
    )
    routing = routing or plugins.build("routing", "predicted_ttft")
    return replay(rows, fleet, routing, speed=speed, decode=False, early=early)


def p95(run: Replayed) -> float:
    return float(np.percentile(run.ttft_s, 95))


def alone_s(rows: Sequence[TraceRow]) -> FloatArray:
    """Seconds of each prompt without a cache or another request."""
    tokens = np.array([row.num_tokens for row in rows], dtype=np.float64)
    return PREFILL["a"] + tokens * (PREFILL["b"] + PREFILL["c"] * tokens / 2)

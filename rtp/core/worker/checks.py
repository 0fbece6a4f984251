"""Whether a Submit can be served at all: bounds on everything that came over the wire."""

from __future__ import annotations

import math

import numpy as np

from rtp.core.hashing import DIGESTS
from rtp.core.messages import Submit
from rtp.core.ports import Capacity
from rtp.core.types import HASH_BYTES, Ids

NAMESPACE_BYTES = 32
MAX_CHOICES = 128
MAX_NUMBER = 1 << 62


def refusal(submit: Submit, capacity: Capacity) -> str | None:
    """The reason why this rank can never run it ("invalid", "too_long", "deadline"), or None.

    Cost O(tokens), vectorised.
    """
    num_prompt = len(submit.prompt) // 4
    max_tokens = submit.sampling.max_tokens
    choices = [state.choice for state in submit.choices]
    sound = (
        _in_vocabulary(submit.prompt, capacity.vocab_size)
        and num_prompt > 0
        and len(submit.hashes) == num_prompt // capacity.block_size * HASH_BYTES
        and len(submit.namespace) == NAMESPACE_BYTES
        and submit.namespace[0] < len(DIGESTS)
        and max_tokens >= 0
        and 0 < len(choices) <= MAX_CHOICES
        and len(set(choices)) == len(choices)
        and all(0 <= choice < MAX_CHOICES for choice in choices)
        and all(_in_vocabulary(state.output, capacity.vocab_size) for state in submit.choices)
        and all(len(state.output) // 4 <= max_tokens for state in submit.choices)
        and submit.number < MAX_NUMBER
        and math.isfinite(submit.deadline_s)
    )
    if not sound:
        return "invalid"
    if num_prompt + max_tokens > capacity.max_model_len:
        return "too_long"
    return None if submit.deadline_s > 0 else "deadline"


def _in_vocabulary(ids: Ids, vocab_size: int) -> bool:
    if len(ids) % 4:
        return False
    values = np.frombuffer(ids, dtype="<i4")
    return not len(values) or bool(values.min() >= 0 and values.max() < vocab_size)

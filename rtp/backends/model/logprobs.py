"""Log-probabilities of the model's raw distribution, for chosen tokens and for the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rtp.core.steps import TokenLogprobs

_SLICE = 64
"""Prompt positions whose logits exist at one time."""


def token_logprobs(
    logits: Tensor, tokens: npt.NDArray[np.int64], alternatives: list[int]
) -> list[TokenLogprobs]:
    """For float32 logits [S, vocab]: log-probability of each row's token and of its best
    alternatives, as many as it asks for. Both are read from one array, so equal ids have equal
    bits."""
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs.gather(1, torch.from_numpy(tokens)[:, None])[:, 0].tolist()
    most = min(max(alternatives), logprobs.shape[1])
    best = logprobs.topk(most)
    rows = zip(
        tokens.tolist(),
        chosen,
        alternatives,
        best.indices.tolist(),
        best.values.tolist(),
        strict=True,
    )
    return [
        TokenLogprobs(token, value, tuple(ids[:count]), tuple(values[:count]))
        for token, value, count, ids, values in rows
    ]


def prompt_logprobs(
    hidden: Tensor,
    targets: npt.NDArray[np.int32],
    alternatives: int,
    to_logits: Callable[[Tensor], Tensor],
) -> Iterator[TokenLogprobs]:
    """Scores targets [T] given hidden states [T, H], a slice of logits at a time."""
    for first in range(0, len(targets), _SLICE):
        ids = targets[first : first + _SLICE].astype(np.int64)
        logits = to_logits(hidden[first : first + len(ids)])
        yield from token_logprobs(logits, ids, [alternatives] * len(ids))

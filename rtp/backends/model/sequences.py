"""What sampling must remember of each sequence: its parameters and the tokens it has seen."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rtp.core.steps import SequenceStart
from rtp.core.types import SamplingParams

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


class Sequence:
    """One sequence from its start to its end on this Runner."""

    __slots__ = ("bias_ids", "bias_values", "choice", "prompt", "sampling", "stop_ids", "tokens")

    def __init__(self, start: SequenceStart):
        self.choice = start.choice
        self.sampling = start.sampling
        self.stop_ids = np.array(start.stop_ids, dtype=np.int64)
        self.prompt = np.frombuffer(start.prompt, dtype="<i4")
        bias = start.sampling.logit_bias
        self.bias_ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self.bias_values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self.tokens = SeenTokens(self.prompt) if penalised(start.sampling) else None
        for token in np.frombuffer(start.output, dtype="<i4").tolist():
            self.push(token)

    def push(self, token: int) -> None:
        """Notes a sampled token."""
        if self.tokens is not None:
            self.tokens.push(token)


class SeenTokens:
    """Distinct tokens of prompt and output, and how often each was put out. Grows by doubling."""

    def __init__(self, prompt: npt.NDArray[np.int32]):
        distinct = np.unique(prompt).astype(np.int64)
        self._size = len(distinct)
        self._ids = np.zeros(max(64, 2 * self._size), dtype=np.int64)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._place = {token: place for place, token in enumerate(distinct.tolist())}

    def push(self, token: int) -> None:
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1

    @property
    def ids(self) -> Int64:
        return self._ids[: self._size]

    @property
    def counts(self) -> Float32:
        """Times in the output, of each of `ids`; 0 for those of the prompt alone."""
        return self._counts[: self._size]


def penalised(sampling: SamplingParams) -> bool:
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )

"""The words every room of the tree shares: ids, roles, tiers, sampling parameters, packed
arrays."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import NewType

import msgspec
import numpy as np
import numpy.typing as npt

RequestId = NewType("RequestId", str)
"""Made by the frontend, unique in the cluster. A client's X-Request-Id is never used as this
key."""
WorkerId = NewType("WorkerId", str)
FrontendId = NewType("FrontendId", str)
RankId = NewType("RankId", int)
"""Row of a rank (one KV pool) in the Master's tables. Rows are reused after a worker is
forgotten."""

Hashes = bytes
"""A list of 128-bit block hashes, 16 bytes each, back to back, in prefix order."""
Ids = bytes
"""A list of token ids, int32 little-endian, back to back."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
UInt64Array = npt.NDArray[np.uint64]

HASH_BYTES = 16


class Role(StrEnum):
    """What a worker does with a request (design section 1)."""

    PREFILL = "prefill"
    DECODE = "decode"
    FUSION = "fusion"
    ENCODE = "encode"


class Tier(IntEnum):
    """Where a block's bytes lie, nearest first."""

    DEVICE = 0
    HOST = 1
    REMOTE = 2
    STORE = 3


class FinishReason(StrEnum):
    """Why one choice ended well."""

    STOP = "stop"
    LENGTH = "length"


class SamplingParams(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """How the next token is chosen. Checked at the edge (io/openai_schema); cores and Runners trust
    it.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. logprobs is the number of
    alternatives wanted beside the chosen token (0: the chosen one only), None for no logprobs.
    prompt_logprobs likewise for the prompt; it bypasses prefix reuse. seed is 64-bit and always
    set: the frontend draws one when the client gave none, so that resume continues the same stream.
    """

    max_tokens: int
    """Output tokens of one choice, resumed ones included. 0 asks for the prompt's logprobs only."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


def pack_ids(ids: Iterable[int]) -> Ids:
    """Token ids as int32 little-endian bytes."""
    return np.fromiter(ids, dtype="<i4").tobytes()


def unpack_ids(ids: Ids) -> list[int]:
    """The inverse of pack_ids."""
    values: list[int] = np.frombuffer(ids, dtype="<i4").tolist()
    return values


def num_hashes(hashes: Hashes) -> int:
    return len(hashes) // HASH_BYTES


def split_hashes(hashes: Hashes) -> list[bytes]:
    """One 16-byte key per block, in prefix order."""
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]

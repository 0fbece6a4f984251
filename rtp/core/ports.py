"""What the cores need from outside, as protocols. Implementations live in backends/ and io/."""

from __future__ import annotations

from typing import Protocol

import msgspec

from rtp.core.messages import Source
from rtp.core.steps import StepPlan, StepResult


class Capacity(msgspec.Struct, frozen=True, gc=False):
    """What a Runner offers once its model is loaded."""

    num_blocks: int
    """Pages of the device tier; ids 0 .. num_blocks-1."""
    block_size: int
    max_model_len: int
    """Longest sequence in tokens, prompt and output together."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    kv_format: str
    """Names the bytes of a page (weights revision, dtype, shapes, layout): see design section 2."""
    revision: str = ""
    """Names the weights; "" where there are none. Part of the block hash seed."""


class Runner(Protocol):
    """Executes steps that the batcher planned. Used from one thread or process at a time.

    Built by a backend's `build(**params)`. A Runner never raises for the contents of a valid plan:
    non-finite rows are reported in the result.
    """

    capacity: Capacity

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step to its end. `elapsed_s` is measured, or computed by a simulated Runner."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Moves KV pages between workers. Built by the `build(**params)` of a module in
    backends/transport, whose `BACKENDS` names those whose pages it can move."""

    latency_s: float
    tokens_per_s: float
    """inf: all at once."""

    async def pull(self, source: Source, start: int, num_tokens: int, pages: bytes) -> None:
        """Fills `pages` with num_tokens tokens of the source's, from position `start` on.

        Returns when the last one is filled. Raises TransferFailed, and from then on writes nothing;
        likewise when cancelled, which is how its time limit ends it.
        """
        ...


class Detokenizer(Protocol):
    """Incremental ids -> text of one choice. Pieces joined equal the decoding of all ids."""

    def push(self, token: int) -> str:
        """Text that became certain with this token; '' while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What an end of stream leaves: incomplete bytes as U+FFFD, or ''."""
        ...

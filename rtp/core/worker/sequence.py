"""One choice of one request on one rank: its tokens, how far they are computed, its pages.

Three counters run behind each other: `computed <= scheduled <= length`. `scheduled` counts tokens
that issued plans put into the pages, `computed` those whose step has come back finite, `length` all
tokens, with the samples still in flight. A step always takes tokens from `scheduled` on; a sequence
that has caught up (scheduled == length) has nothing to do until a result arrives.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from rtp.core.hashing import block_hashes
from rtp.core.messages import Source, Submit
from rtp.core.ports import Capacity
from rtp.core.steps import FromStep, Known, Row, SequenceStart, TokenLogprobs
from rtp.core.types import HASH_BYTES, Hashes, Ids, RequestId, SamplingParams, split_hashes


def int32s(data: bytes | Iterable[int] = b"") -> array[int]:
    """A growing list of int32 whose slices become bytes without a loop."""
    values = array("i")
    if isinstance(data, bytes):
        values.frombytes(data)
    else:
        values.extend(data)
    return values


class Sequence:
    """Changed by the batcher only; the worker reads it."""

    __slots__ = (
        "announced", "arrival", "attempt", "bypassed", "cached", "choice", "computed", "ended",
        "handle", "ids", "keys", "limit", "namespace", "num_prompt", "pages", "pending",
        "preemptions", "prompt_logprobs", "pull", "registered", "request_id", "sampling",
        "scheduled", "source", "stop_ids", "target", "until", "waits_for", "wants_prompt_logprobs",
    )  # fmt: skip

    def __init__(
        self,
        *,
        request_id: RequestId,
        attempt: int,
        choice: int,
        prompt: Ids,
        output: Ids,
        hashes: Hashes,
        namespace: bytes,
        sampling: SamplingParams,
        eos_ids: tuple[int, ...],
        max_model_len: int,
        source: Source | None = None,
        hands_over: bool = False,
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.choice = choice
        self.sampling = sampling
        self.namespace = namespace
        self.ids = int32s(prompt + output)
        self.num_prompt = len(prompt) // 4
        self.limit = min(sampling.max_tokens, max_model_len - self.num_prompt)
        """Output tokens after which the choice ends with "length"."""
        self.until = min(self.limit, len(output) // 4 + 1) if hands_over else self.limit
        """Output tokens after which it ends here: before `limit` it goes on elsewhere."""
        self.source = source
        """Who may have its pages; None too once they came, or did not."""
        self.pull: int | None = None
        """The transfer under way into its pages: until it ends no step may touch them."""
        self.announced = False
        """The Runner knows its handle."""
        self.stop_ids = sampling.stop_token_ids + (() if sampling.ignore_eos else eos_ids)
        self.wants_prompt_logprobs = sampling.prompt_logprobs is not None and choice == 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.keys = split_hashes(hashes)
        self.arrival = -1
        self.handle = -1
        self.ended = False
        self.pages = int32s()
        self.pending: deque[FromStep] = deque()
        """Samples in flight: pending[k] becomes ids[len(ids) + k]."""
        self.scheduled = 0
        self.computed = 0
        self.registered = 0
        """Leading blocks that are findable in the cache."""
        self.target = len(self.ids)
        """Tokens known when it was last started: below it the work is prefill, from it on
        decode."""
        self.cached = -1
        """Tokens found in the cache when it first started; -1 before that."""
        self.waits_for: bytes | None = None
        self.bypassed = 0
        self.preemptions = 0

    @property
    def length(self) -> int:
        return len(self.ids) + len(self.pending)

    @property
    def num_output(self) -> int:
        """Known output tokens, resumed ones included."""
        return len(self.ids) - self.num_prompt

    @property
    def to_compute(self) -> int:
        """Tokens a next step could take. 0 too where all that may be sampled is in flight."""
        outputs = self.length - self.num_prompt
        if outputs >= self.until and outputs > 0:
            return 0
        return self.length - self.scheduled

    @property
    def in_prefill(self) -> bool:
        return self.scheduled < self.target

    def reusable(self, block_size: int) -> int:
        """Blocks it may take from the cache: the last token is always computed, and prompt
        log-probabilities need every position."""
        if self.wants_prompt_logprobs:
            return 0
        return (len(self.ids) - 1) // block_size

    def extend_keys(self, block_size: int) -> None:
        """Continues the hash chain over the whole blocks of known tokens."""
        start = len(self.keys) * block_size
        if len(self.ids) - start >= block_size:
            tail = self.ids[start:].tobytes()
            parent = self.keys[-1] if self.keys else b""
            more = block_hashes(tail, block_size, self.namespace, parent)
            self.keys += [more[i : i + HASH_BYTES] for i in range(0, len(more), HASH_BYTES)]

    def start_info(self) -> SequenceStart:
        return SequenceStart(
            sequence=self.handle,
            choice=self.choice,
            prompt=self.ids[: self.num_prompt].tobytes(),
            output=self.ids[self.num_prompt :].tobytes(),
            sampling=self.sampling,
            stop_ids=self.stop_ids,
        )

    def row(self, num_new: int, block_size: int) -> Row:
        """The row that computes the next `num_new` tokens; does not move `scheduled`."""
        start, end = self.scheduled, self.scheduled + num_new
        known = len(self.ids)
        inputs: Known | FromStep
        if end <= known:
            inputs = Known(self.ids[start:end].tobytes())
        else:
            # Prefill ends with known tokens, so a row beyond them is a single decode token.
            assert num_new == 1, "a row mixes known tokens with one in flight"
            inputs = self.pending[start - known]
        samples = end == self.length and self.limit > 0
        return Row(
            sequence=self.handle,
            start=start,
            num_new=num_new,
            inputs=inputs,
            pages=self.pages[: -(-end // block_size)].tobytes(),
            output_index=self.length - self.num_prompt if samples else -1,
            prompt_logprobs=self.sampling.prompt_logprobs
            if self.wants_prompt_logprobs and self.sampling.prompt_logprobs is not None
            else -1,
        )

    def begin(self, pages: list[int], num_held: int, block_size: int) -> None:
        """It has pages for all known tokens; the first `num_held` hold computed tokens."""
        self.pages.extend(pages)
        self.registered = num_held
        self.scheduled = self.computed = num_held * block_size
        self.target = len(self.ids)
        self.waits_for = None
        if self.cached < 0:
            self.cached = min(self.scheduled, self.num_prompt)

    def restart(self) -> None:
        """Back to having nothing computed, keeping all known tokens: preempted or parked."""
        self.pages = int32s()
        self.pending.clear()
        self.scheduled = self.computed = self.registered = 0
        self.target = len(self.ids)
        self.bypassed = 0
        self.handle = -1
        self.announced = False
        self.pull = None
        if self.wants_prompt_logprobs:
            self.prompt_logprobs.clear()


def sequences(submit: Submit, capacity: Capacity) -> list[Sequence]:
    """One for each choice of a Submit that was checked."""
    return [
        Sequence(
            request_id=submit.request_id,
            attempt=submit.attempt,
            choice=state.choice,
            prompt=submit.prompt,
            output=state.output,
            hashes=submit.hashes,
            namespace=submit.namespace,
            sampling=submit.sampling,
            eos_ids=capacity.eos_ids,
            max_model_len=capacity.max_model_len,
            source=state.source,
            hands_over=submit.handover is not None,
        )
        for state in submit.choices
    ]

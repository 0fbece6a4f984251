"""Output of a choice that its frontend has not acknowledged, and the attempt it belongs to."""

from __future__ import annotations

from collections import deque
from itertools import islice

from rtp.core.messages import Place, Source, TokenRun
from rtp.core.steps import TokenLogprobs
from rtp.core.types import FrontendId, RequestId
from rtp.core.worker.in_flight import Gain
from rtp.core.worker.sequence import Sequence


class Stream:
    """Tokens of one choice, kept until acknowledged. Output indices count resumed tokens too."""

    __slots__ = (
        "_first", "_ids", "_logprobs", "_prompt_logprobs", "_start", "finish", "parked_at",
        "sequence", "source", "stop_token",
    )  # fmt: skip

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.finish = ""
        self.stop_token = -1
        self.source: Source | None = None
        """Its pages, once it was handed over."""
        self.parked_at: float | None = None
        self._first = sequence.num_output
        self._start = self._first
        self._ids: deque[int] = deque()
        self._logprobs: deque[TokenLogprobs] = deque()
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def num_unacked(self) -> int:
        return len(self._ids)

    def push(self, gain: Gain) -> TokenRun:
        """Takes what a step brought and returns it as a run."""
        index = self._start + len(self._ids)
        self._ids += gain.ids
        self._logprobs += gain.logprobs
        self._prompt_logprobs += gain.prompt_logprobs
        self.finish = gain.finish
        self.stop_token = gain.stop_token
        return self._run(index)

    def acknowledge(self, next_index: int) -> None:
        for _ in range(min(next_index - self._start, len(self._ids))):
            self._ids.popleft()
            if self._logprobs:
                self._logprobs.popleft()
            self._start += 1
        if self._start > self._first:
            self._prompt_logprobs = ()

    def unacked(self) -> TokenRun | None:
        """Everything not acknowledged, as one run; None where there is nothing to repeat."""
        return self._run(self._start) if self._ids or self.finish else None

    def _run(self, index: int) -> TokenRun:
        skip = index - self._start
        first = index == self._first
        return TokenRun(
            request_id=self.sequence.request_id,
            attempt=self.sequence.attempt,
            choice=self.sequence.choice,
            first_index=index,
            ids=tuple(islice(self._ids, skip, None)),
            logprobs=tuple(islice(self._logprobs, skip, None)),
            finish=self.finish,
            stop_token=self.stop_token,
            cached_tokens=max(0, self.sequence.cached) if first else 0,
            prompt_logprobs=self._prompt_logprobs if first else (),
            source=self.source,
        )


class Attempt:
    """One accepted (request_id, attempt). It holds its streams until all are acknowledged; it is
    `told` once its end was reported to the Master, which happens when the last choice stops
    generating."""

    __slots__ = (
        "accepted_at", "attempt", "cached", "deadline", "first_step_at", "first_token_told",
        "frontend_id", "generated", "handed_at", "handover", "prefill_s", "prompt_tokens", "rank",
        "request_id", "streams", "tickets", "timer", "told",
    )  # fmt: skip

    def __init__(
        self,
        *,
        request_id: RequestId,
        attempt: int,
        frontend_id: FrontendId,
        rank: int,
        prompt_tokens: int,
        accepted_at: float,
        deadline: float,
        handover: Place | None = None,
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.frontend_id = frontend_id
        self.rank = rank
        self.prompt_tokens = prompt_tokens
        self.accepted_at = accepted_at
        self.deadline = deadline
        self.timer = deadline
        """When the worker must look at it next: its deadline, the end of a slow reader's time, or
        of the lease of what was handed over."""
        self.handover = handover
        """Where it goes on after its first tokens."""
        self.handed_at: float | None = None
        self.tickets: list[bytes] = []
        """Of the pages that are pinned for it."""
        self.streams: dict[int, Stream] = {}
        self.cached = 0
        self.generated = 0
        self.prefill_s = 0.0
        self.first_step_at: float | None = None
        self.first_token_told = False
        self.told = False

    @property
    def generating(self) -> bool:
        """Whether some choice still runs, waits or is parked."""
        return any(not stream.finish for stream in self.streams.values())

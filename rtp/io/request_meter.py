"""What one HTTP request measures while it runs: first tokens, gaps, counts, running usage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rtp.core.commands import Chunk, Deliver
from rtp.io.metrics import ModelMetrics
from rtp.io.openai_shapes import Usage, usage


class RequestMeter:
    """Of one HTTP request with `len(num_tokens)` prompts; seconds from `arrived`, by `clock`."""

    def __init__(
        self,
        model: ModelMetrics,
        num_tokens: Sequence[int],
        arrived: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._num_tokens = num_tokens
        self._arrived = arrived
        self._clock = clock
        self._last: dict[tuple[int, int], float] = {}
        """When each choice last gained tokens, by (prompt number, choice)."""
        self._cached = [0] * len(num_tokens)
        self._begun: set[int] = set()
        self._generated = 0
        self._told = 0
        self._reasons: list[str] = []
        self._ttft_s: float | None = None

    def deliver(self, prompt_no: int, deliver: Deliver) -> None:
        """Notes one delivery; costs a few microseconds a chunk."""
        now = self._clock()
        if prompt_no not in self._begun:
            self._begun.add(prompt_no)
            self._first(prompt_no, deliver, now - self._arrived)
        gained = 0
        for chunk in deliver.chunks:
            if chunk.finish:
                self._reasons.append(chunk.finish)
            if not chunk.ids:
                continue
            gained += len(chunk.ids)
            before = self._last.get((prompt_no, chunk.choice))
            self._last[prompt_no, chunk.choice] = now
            if before is not None:
                self._model.next_tokens(now - before, len(chunk.ids))
        self._generated += gained
        self._model.tokens(gained)

    def usage(self, prompt_no: int, deliver: Deliver, chunk: Chunk) -> Usage:
        """Usage up to and with this chunk: output grows by chunks, prompts count once (S09)."""
        self._cached[prompt_no] = deliver.cached_tokens
        self._told += len(chunk.ids)
        return usage(sum(self._num_tokens), self._told, sum(self._cached))

    def finished(self) -> None:
        """All choices are complete."""
        self._model.finished(self._reasons, self._clock() - self._arrived)

    def facts(self) -> dict[str, object]:
        """For the log line."""
        return {
            "generated": self._generated,
            "ttft_ms": None if self._ttft_s is None else round(1000 * self._ttft_s, 1),
        }

    def _first(self, prompt_no: int, deliver: Deliver, seconds: float) -> None:
        if self._ttft_s is None:
            self._ttft_s = seconds
        self._model.first_token(seconds)
        self._model.prompt(self._num_tokens[prompt_no], deliver.cached_tokens)

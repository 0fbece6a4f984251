"""The last minute in numbers for the dashboard: rates per second, percentiles. Bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 60
MAX_SAMPLES = 4096
"""Latest samples kept per percentile; under heavy load they span less than the window."""


class Recent:
    """Per-second counts over the last WINDOW_S seconds, and samples not older than that."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._second = int(clock())
        self._rings = {
            name: deque([0] * WINDOW_S, maxlen=WINDOW_S)
            for name in ("requests", "failures", "tokens", "prompt_tokens", "cached_tokens")
        }
        self._ttft: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        self._gap: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def request(self, *, ok: bool) -> None:
        self._add("requests", 1)
        if not ok:
            self._add("failures", 1)

    def tokens(self, count: int) -> None:
        self._add("tokens", count)

    def prompt(self, num_tokens: int, cached_tokens: int) -> None:
        self._add("prompt_tokens", num_tokens)
        self._add("cached_tokens", cached_tokens)

    def ttft(self, seconds: float) -> None:
        self._ttft.append((self._clock(), seconds))

    def gap(self, seconds: float) -> None:
        self._gap.append((self._clock(), seconds))

    def snapshot(self) -> dict[str, object]:
        """Series of whole seconds, oldest first, and percentiles in ms (null: no sample)."""
        self._advance()
        series = {name: list(ring)[:-1] for name, ring in self._rings.items()}
        prompt, cached = sum(series["prompt_tokens"]), sum(series["cached_tokens"])
        return {
            "window_s": WINDOW_S,
            "series": series,
            "hit_rate": cached / prompt if prompt else None,
            "ttft_ms": self._percentiles(self._ttft),
            "tpot_ms": self._percentiles(self._gap),
        }

    def _add(self, name: str, count: int) -> None:
        self._advance()
        self._rings[name][-1] += count

    def _advance(self) -> None:
        second = int(self._clock())
        behind = min(second - self._second, WINDOW_S)
        if behind > 0:
            for ring in self._rings.values():
                ring.extend([0] * behind)
            self._second = second

    def _percentiles(self, samples: deque[tuple[float, float]]) -> dict[str, float | None]:
        oldest = self._clock() - WINDOW_S
        while samples and samples[0][0] < oldest:
            samples.popleft()
        values = sorted(value for _, value in samples)
        return {f"p{q}": _percentile(values, q) for q in (50, 95, 99)}


def _percentile(values: list[float], q: int) -> float | None:
    """Nearest rank, in milliseconds."""
    if not values:
        return None
    return 1000 * values[min(len(values) - 1, len(values) * q // 100)]

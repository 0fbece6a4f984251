"""`python -m rtp.master` with every callback of its loop timed, and the loop's lateness.

    python -m bench.watched_master OUT.json [options of rtp.master]

A callback is what the loop calls before it calls the next: reads, turns, writes, timers, steps of
coroutines. Each is timed in CPU of its thread, which preemption does not lengthen, and in wall
time. A timer every 10 ms says how late the loop is. Between SIGUSR1 and SIGUSR2 all is noted; then
it is written down. The timing itself costs about 3 us a callback.
"""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import sys
import time
from array import array
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

import rtp.master
from rtp.io import upgrade

SAMPLE_S = 0.010
KEPT = 12
LEAST_S = 0.0005
"""Shorter callbacks are only counted."""


class Watch:
    """Counts callbacks, keeps the long ones and every sample of lateness, from begin() to end()."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.num_callbacks = 0
        self.cpu_s = 0.0
        self.long: list[tuple[float, float, str]] = []
        """CPU and wall seconds, and what was called."""
        self.late = array("d")

    def timed(self, callback: Callable[..., Any]) -> Callable[..., Any]:  # Any: the loop's own
        """The callback, with its times taken."""

        def run(*args: Any) -> Any:
            wall, cpu = time.monotonic(), time.thread_time()
            try:
                return callback(*args)
            finally:
                took = time.thread_time() - cpu
                self.num_callbacks += 1
                self.cpu_s += took
                if took > LEAST_S:
                    self.long.append((took, time.monotonic() - wall, _name(callback)))

        return run

    def sample(self, loop: asyncio.AbstractEventLoop, due: float | None) -> None:
        """Notes how late it is called, and sees to being called again."""
        now = time.monotonic()
        if due is not None:
            self.late.append(max(0.0, now - due))
        loop.call_later(SAMPLE_S, self.sample, loop, now + SAMPLE_S)

    def end(self, path: Path) -> None:
        late = np.quantile(np.array(self.late or [0.0]), [0.5, 0.99, 0.9999, 1.0]) * 1e3
        path.write_text(
            json.dumps(
                {
                    "callbacks": self.num_callbacks,
                    "cpu_s": self.cpu_s,
                    "longest": sorted(self.long, reverse=True)[:KEPT],
                    "over_2_ms": sum(cpu > 0.002 for cpu, _, _ in self.long),
                    "over_5_ms": sum(cpu > 0.005 for cpu, _, _ in self.long),
                    "late_samples": len(self.late),
                    "late_ms": late.tolist(),
                }
            )
        )


WATCH = Watch()


class WatchedLoop(uvloop.Loop):
    """uvloop's loop, every callback timed."""

    # Any, and the ignores: what asyncio's types say in many words, is passed on.
    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_soon(WATCH.timed(callback), *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: Any, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return super().call_later(delay, WATCH.timed(callback), *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: Any, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return super().call_at(when, WATCH.timed(callback), *args, context=context)

    def add_reader(self, fileobj: Any, callback: Any, *args: Any) -> Any:  # type: ignore[override]
        return super().add_reader(fileobj, WATCH.timed(callback), *args)


def _name(callback: Callable[..., Any]) -> str:
    found = callback.func if isinstance(callback, functools.partial) else callback
    return getattr(found, "__qualname__", None) or type(found).__name__


def main() -> None:
    out = Path(sys.argv.pop(1))
    signal.signal(signal.SIGUSR1, lambda number, frame: WATCH.begin())
    signal.signal(signal.SIGUSR2, lambda number, frame: WATCH.end(out))
    # What arrives on an upgraded connection comes from the transport, not from the loop.
    gate = upgrade._Gate
    received = gate.data_received
    gate.data_received = lambda self, data: WATCH.timed(received)(self, data)  # type: ignore[method-assign]
    run = uvloop.run

    async def watched(serve: Coroutine[Any, Any, None]) -> None:
        WATCH.sample(asyncio.get_running_loop(), None)
        await serve

    uvloop.run = lambda serve: run(watched(serve), loop_factory=WatchedLoop)  # type: ignore[assignment]
    rtp.master.main()


if __name__ == "__main__":
    main()

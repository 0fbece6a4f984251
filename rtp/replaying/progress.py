"""Progress of runs: bars with the time that is left on a terminal, a line per finished run
elsewhere. All of it goes to stderr; stdout holds results."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class Bars:
    """A context; names: one per run."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._begun = time.monotonic()
        self._bars: Progress | None = None
        self._tasks = []
        if sys.stderr.isatty():
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=Console(stderr=True),
                auto_refresh=False,  # by a thread, and runs are forked beside it
            )
            self._tasks = [self._bars.add_task(name, total=1.0, start=False) for name in names]

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def moved(self, number: int, fraction: float) -> None:
        if self._bars is not None:
            self._bars.start_task(self._tasks[number])
            self._bars.update(self._tasks[number], completed=fraction, refresh=True)

    def ended(self, number: int) -> None:
        if self._bars is not None:
            self._bars.update(self._tasks[number], completed=1.0, refresh=True)
        else:
            seconds = time.monotonic() - self._begun
            print(f"{self._names[number]}: done at {seconds:.1f} s", file=sys.stderr, flush=True)

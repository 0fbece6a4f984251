"""Progress of several things that start: an area that redraws on a terminal, plain lines
elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner


class Progress:
    """line(name, text) says what a thing does now."""

    def __init__(self) -> None:
        self._spinners: dict[str, Spinner] = {}
        self._live: Live | None = None
        if sys.stdout.isatty():
            self._live = Live(console=Console(), refresh_per_second=8, transient=True)
            self._live.start()

    def line(self, name: str, text: str) -> None:
        if self._live is None:
            print(f"{name}: {text}", flush=True)
            return
        self._spinners[name] = Spinner("dots", text=f"{name:<10} {text}")
        self._live.update(Group(*(self._spinners[n] for n in sorted(self._spinners))))

    def close(self) -> None:
        """Clears the area; further lines are plain."""
        if self._live is not None:
            self._live.stop()
            self._live = None

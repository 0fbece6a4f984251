"""A child process that is kept running: started again with growing pauses, ended with its
parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rtp.settings import OTHER_VARIABLES, PREFIX

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 10.0
WELL_AFTER_S = 60.0
"""A child that ran so long starts again with the first pause."""


class Child:
    """`python -m MODULE FLAGS`, its errors in a log file, its output lines told as progress.

    It gets its own session, so that a terminal's ^C reaches the parent alone, and the parent's pid,
    by which the kernel ends it should the parent be killed. on_line(name, line): its output, and
    what becomes of it.  on_failed(name, reason): it ended before well was set; it is not started
    again.
    """

    def __init__(
        self,
        name: str,
        module: str,
        flags: Sequence[str],
        log: Path,
        on_line: Callable[[str, str], None],
        on_failed: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.log = log
        self.well = False
        """Set by the owner once it has served: from then on it is worth starting again."""
        self.restarting = False
        """It ended; its owner clears this when it serves again."""
        self._module = module
        self._command = [sys.executable, "-m", module, *flags, f"--parent={os.getpid()}"]
        self._on_line = on_line
        self._on_failed = on_failed
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._task = asyncio.create_task(self._run())

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; after the first one it is not started again."""
        self._stopping = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
        else:
            self._task.cancel()

    async def ended(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stopping:
            began = time.monotonic()
            code = await self._once()
            if self._stopping:
                return
            self.restarting = True
            if not self.well:
                self._on_failed(self.name, self._last_words() or f"ended with {code}")
                return
            if time.monotonic() - began > WELL_AFTER_S:
                pause = FIRST_PAUSE_S
            why = self._complaint()
            self._on_line(
                self.name, f"{why or f'ended with {code}'}; starting again in {pause:g} s"
            )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)

    async def _once(self) -> int:
        """One life; returns its exit status, minus the signal that ended it."""
        environment = {
            name: value
            for name, value in os.environ.items()
            # Settings meant for the parent came to its children as flags.
            if not name.startswith(PREFIX) or name in OTHER_VARIABLES
        }
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._on_line(self.name, line.decode(errors="replace").strip())
        code = await self._process.wait()
        self._process = None
        return code

    def _complaint(self) -> str:
        """Why it ended, where it said so itself: one that was killed did not."""
        said = self._last_words()
        return said if said.startswith(f"{self._module}: ") else ""

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

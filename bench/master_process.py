"""A Master in a process of its own, pinned to a core, and what the kernel says it costs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import ROOT
from bench.servers import free_port

HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all threads of a process since their start, by the kernel's own clock, seconds."""

    at: float
    cpu_s: float
    queued_s: float
    """Ready to run, but another process had the core."""
    rss_bytes: int
    stolen_s: float
    """Taken by the hypervisor, on all cores."""


@dataclass(frozen=True, slots=True)
class Observer:
    """A module that runs rtp.master, and the file it writes what it saw to."""

    module: str
    out: Path


class MasterProcess:
    """`python -m rtp.master` on a port of its own."""

    def __init__(
        self, process: subprocess.Popen[bytes], url: str, secret: bytes, observed: bool
    ) -> None:
        self.url = url
        self.secret = secret
        self._observed = observed
        self._process = process

    @property
    def address(self) -> str:
        return self.url.partition("://")[2]

    def usage(self) -> Usage:
        proc = Path(f"/proc/{self._process.pid}")
        times = [
            [int(word) for word in (task / "schedstat").read_text().split()[:2]]
            for task in (proc / "task").iterdir()
        ]
        pages = int((proc / "statm").read_text().split()[1])
        return Usage(
            at=time.monotonic(),
            cpu_s=sum(time[0] for time in times) / 1e9,
            queued_s=sum(time[1] for time in times) / 1e9,
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            stolen_s=int(Path("/proc/stat").read_text().split()[8]) / HZ,
        )

    def begin_window(self) -> None:
        """Tells an observer that what comes counts."""
        if self._observed:
            self._process.send_signal(signal.SIGUSR1)

    def end_window(self) -> None:
        """Tells it that no more does."""
        if self._observed:
            self._process.send_signal(signal.SIGUSR2)

    def overview(self) -> dict[str, Any]:  # Any: JSON
        """What the dashboard shows. Stops the Master for some milliseconds: not while measuring."""
        with urllib.request.urlopen(f"{self.url}/dashboard/data.json", timeout=30) as reply:
            found: dict[str, Any] = json.load(reply)
        return found


@contextlib.contextmanager
def run_master(
    core: int, extra: Sequence[str] = (), observer: Observer | None = None
) -> Iterator[MasterProcess]:
    """Starts it, waits until it answers, ends it at exit. Raises RuntimeError with the end of its
    log where it does not start."""
    with tempfile.TemporaryDirectory() as directory:
        secret_file = Path(directory) / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(os.urandom(32).hex())
        port = free_port()
        command = [sys.executable, "-m", "rtp.master"]
        if observer is not None:
            command = [sys.executable, "-m", observer.module, str(observer.out)]
        command += ["--port", str(port), "--state", directory, "--secret-file", str(secret_file)]
        command += ["--parent", str(os.getpid()), *extra]
        log = Path(directory) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if not k.startswith("RTP_")},
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
        url = f"http://127.0.0.1:{port}"
        try:
            while not _answers(f"{url}/live"):
                if process.poll() is not None:
                    raise RuntimeError(f"the Master ended:\n{log.read_text()[-2000:]}")
                time.sleep(0.05)
            secret = secret_file.read_text().encode()
            yield MasterProcess(process, url, secret, observer is not None)
            trouble = [x for x in log.read_text().splitlines() if "core.failed" in x]
            if trouble:
                print(f"the Master's core failed {len(trouble)} times: {trouble[0][:2000]}")
        finally:
            process.terminate()
            process.wait(30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False

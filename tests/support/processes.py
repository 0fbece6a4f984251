"""The worker processes behind a server started with rtp.local, found by their command lines."""

from __future__ import annotations

import psutil


def workers(root_pid: int) -> list[psutil.Process]:
    """Control processes of the workers (`python -m rtp.worker`) under `root_pid`, oldest first."""
    found = []
    for process in psutil.Process(root_pid).children(recursive=True):
        line = process.cmdline()
        if "rtp.worker" in line:
            found.append(process)
    return sorted(found, key=lambda p: p.create_time())


def ranks(worker: psutil.Process) -> list[psutil.Process]:
    """The Runner processes of a worker's control process."""
    return [child for child in worker.children() if "rtp.rank" in child.cmdline()]


def kill(worker: psutil.Process) -> None:
    """kill -9 of a worker's whole process group: control process and Runners."""
    group = [worker, *worker.children(recursive=True)]
    for process in group:
        process.kill()
    psutil.wait_procs(group, 10)

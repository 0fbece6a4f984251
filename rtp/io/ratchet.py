"""Numbers that only grow, over restarts and over a clock that is set back.

A Master's term and a worker's epoch tell a later life from an earlier one. The time in milliseconds
does so while the clock goes forward; the last number used, kept in a file, does so else.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

LARGEST = 1 << 62
"""What a frame's integer holds, with room to count on."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def next_number(path: Path) -> tuple[int, str]:
    """The larger of the time in ms and the last number of this file + 1, and why it could not be
    kept or the last one not be read; "" when all is well.

    Processes that share the file get different numbers, as long as it can be written. It is
    replaced as a whole: a crash leaves the old number or the new one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        return now_ms(), str(error)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # of the folder, for the file itself is replaced
        last, reason = _read(path)
        number = max(now_ms(), last + 1)
        _write(path, number)
    except OSError as error:
        last, _ = _read(path)
        return max(now_ms(), last + 1), str(error)
    finally:
        os.close(folder)
    return number, reason


def _read(path: Path) -> tuple[int, str]:
    """The number of the file; -1 where there is none, or none that makes sense, and why."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return -1, ""
    except OSError as error:
        return -1, str(error)
    number = int(text) if len(text) <= 20 and text.strip().isdigit() else LARGEST
    return (number, "") if number < LARGEST else (-1, f"{path} holds no number: {text[:40]!r}")


def _write(path: Path, number: int) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{number}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise

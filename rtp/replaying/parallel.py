"""Several runs at once, each in a process of its own, with their progress.

A child is forked, so it has the rows without a copy, and gives back bytes; its memory goes when it
ends. What a run gives back depends on nothing that runs beside it.
"""

from __future__ import annotations

import multiprocessing
import signal
import struct
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Protocol

from rtp.core.errors import RtpError

_FRACTION = struct.Struct("<d")

Work = Callable[[Callable[[float], None]], bytes]
"""Does a run; tells how much of it is done, 0 to 1; gives back its result."""


class Shown(Protocol):
    """Who is told of the progress: run number, share done."""

    def moved(self, number: int, fraction: float) -> None: ...

    def ended(self, number: int) -> None: ...


def run_all(works: Sequence[Work], cores: int, shown: Shown) -> list[bytes]:
    """Results in the order of `works`. A single one, or one at a time, runs in this process. Raises
    RtpError with the reason of the first that failed; the others are ended."""
    if cores == 1 or len(works) == 1:
        return [_here(number, work, shown) for number, work in enumerate(works)]
    return _Children(works, cores, shown).run()


def _here(number: int, work: Work, shown: Shown) -> bytes:
    result = work(lambda fraction: shown.moved(number, fraction))
    shown.ended(number)
    return result


class _Children:
    def __init__(self, works: Sequence[Work], cores: int, shown: Shown) -> None:
        self._works = works
        self._cores = cores
        self._shown = shown
        self._context = multiprocessing.get_context("fork")
        self._running: dict[Connection, tuple[int, multiprocessing.process.BaseProcess]] = {}
        self._results: dict[int, bytes] = {}
        self._next = 0

    def run(self) -> list[bytes]:
        try:
            while len(self._results) < len(self._works):
                while self._next < len(self._works) and len(self._running) < self._cores:
                    self._start(self._next)
                    self._next += 1
                for ready in wait(list(self._running)):
                    assert isinstance(ready, Connection)
                    self._read(ready)
        finally:
            for _, process in self._running.values():
                process.terminate()
                process.join()
        return [self._results[number] for number in range(len(self._works))]

    def _start(self, number: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(self._works[number], theirs))
        process.start()
        theirs.close()
        self._running[ours] = number, process

    def _read(self, pipe: Connection) -> None:
        number, process = self._running[pipe]
        try:
            message = pipe.recv_bytes()
        except EOFError:
            process.join()
            raise RtpError(f"run {number + 1} died (exit code {process.exitcode})") from None
        kind, body = message[:1], message[1:]
        if kind == b"p":
            self._shown.moved(number, _FRACTION.unpack(body)[0])
            return
        if kind == b"e":
            raise RtpError(body.decode())
        self._results[number] = body
        self._shown.ended(number)
        del self._running[pipe]
        process.join()
        pipe.close()


def _child(work: Work, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    try:
        result = work(lambda fraction: pipe.send_bytes(b"p" + _FRACTION.pack(fraction)))
        pipe.send_bytes(b"r" + result)
    except RtpError as error:
        pipe.send_bytes(b"e" + str(error).encode())
    except Exception:
        pipe.send_bytes(b"e" + traceback.format_exc().encode())

"""A loop that is called more punctually than event loops call: their timers count milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

PERIOD_S = 0.0005
CLOCK_MONOTONIC = 1
clock = time.monotonic


async def every_tick(turn: Callable[[float], None], until: Callable[[], bool]) -> None:
    """Calls turn(now) every half millisecond, as the kernel's timer says (Linux); one that comes
    late makes no others late. Returns once until() holds; raises what either raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    timer = _timer(PERIOD_S)

    def fire() -> None:
        try:
            os.read(timer, 8)
            if until():
                done.set_result(None)
                loop.remove_reader(timer)
            else:
                turn(clock())
        except Exception as error:
            loop.remove_reader(timer)
            done.set_exception(error)

    loop.add_reader(timer, fire)
    try:
        await done
    finally:
        loop.remove_reader(timer)
        os.close(timer)


def _timer(period_s: float) -> int:
    """A file descriptor that can be read once a period. Python has them from 3.13 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    found: int = libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    # struct itimerspec: the period, then the time to the first end, each in s and ns.
    spec = (ctypes.c_long * 4)(0, round(period_s * 1e9), 0, round(period_s * 1e9))
    if found < 0 or libc.timerfd_settime(found, 0, spec, None) < 0:
        raise OSError(ctypes.get_errno(), "no timer of the kernel's")
    return found

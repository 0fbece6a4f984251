"""A lasting trouble is told of at once and once a minute."""

from __future__ import annotations

import asyncio

import aiohttp

from rtp.io.registration import keep_registered
from rtp.io.reminder import AGAIN_S, KEPT, Reminder
from tests.support.sockets import SECRET, a_register


def test_a_trouble_is_told_at_once_and_once_a_minute():
    at = [0.0]
    reminder = Reminder(lambda: at[0])
    told = []
    for second in range(180):
        at[0] = float(second)
        if reminder.due("no Master"):
            told.append(second)
    assert told == [0, AGAIN_S, 2 * AGAIN_S]
    assert reminder.due("another trouble")
    reminder.over()
    assert reminder.due("no Master")


def test_it_remembers_a_bounded_number():
    reminder = Reminder(lambda: 0.0)
    for number in range(KEPT + 1):
        assert reminder.due(str(number))
    assert not reminder.due(str(KEPT))
    assert reminder.due("0"), "forgotten"


async def test_a_worker_without_a_master_says_so_once_and_plainly():
    told: list[str] = []
    unlinked = asyncio.Event()
    unlinked.set()
    tried = asyncio.Semaphore(0)
    trace = aiohttp.TraceConfig()

    async def failed(*_: object) -> None:
        tried.release()

    trace.on_request_exception.append(failed)
    async with aiohttp.ClientSession(trace_configs=[trace]) as session:
        task = asyncio.create_task(
            keep_registered(
                session,
                master="http://127.0.0.1:1",
                register=a_register(),
                secret=SECRET,
                unlinked=unlinked,
                on_change=told.append,
            )
        )
        async with asyncio.timeout(10):
            for _ in range(3):
                await tried.acquire()
        task.cancel()
    assert told == ["http://127.0.0.1:1 does not answer: Connection refused"]

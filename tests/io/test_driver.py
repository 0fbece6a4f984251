"""One Tick behind all input of a turn, deadlines met, no handle() inside a handle()."""

from __future__ import annotations

import asyncio

from rtp.core.commands import Command, Note
from rtp.core.events import Event, FrontendUp, Tick
from rtp.core.types import FrontendId
from rtp.io.clock import now
from rtp.io.driver import Driver
from tests.support.sockets import Recorder


class Order(Recorder):
    """Also remembers the Ticks, in order."""

    def handle(self, event: Event, now: float) -> list[Command]:
        super().handle(event, now)
        if isinstance(event, Tick):
            self.events.append(event)
        return self.answer(event)


def never(error: Exception) -> None:
    raise AssertionError("a fault") from error


def up(name: str) -> FrontendUp:
    return FrontendUp(FrontendId(name))


async def test_all_input_of_a_turn_comes_before_its_one_tick():
    core = Order()
    driver = Driver(core, lambda command: None, never)
    loop = asyncio.get_running_loop()
    for name in "abc":
        loop.call_soon(driver.tell, up(name))
    await core.until(lambda: core.ticks == 1)
    assert core.events == [up("a"), up("b"), up("c"), Tick()]
    driver.tell(up("d"))
    await core.until(lambda: core.ticks == 2)
    assert core.events[4:] == [up("d"), Tick()]
    assert driver.times.turns == 2
    driver.close()


async def test_a_deadline_brings_a_tick_and_a_past_one_brings_it_at_once():
    core = Recorder()
    driver = Driver(core, lambda command: None, never)
    began = now()
    core.deadline = began + 0.02
    driver.tell(up("a"))
    await core.until(lambda: core.ticks >= 2 and now() >= began + 0.02)
    core.deadline = began
    seen = core.ticks
    await core.until(lambda: core.ticks >= seen + 3)
    core.deadline = None
    driver.close()


async def test_an_earlier_deadline_replaces_a_later_one():
    core = Recorder()
    driver = Driver(core, lambda command: None, never)
    core.deadline = now() + 1000
    driver.tell(up("a"))
    await core.until(lambda: core.ticks == 1)
    core.deadline = now() + 0.005
    driver.tell(up("b"))
    await core.until(lambda: core.ticks >= 3)
    driver.close()


async def test_events_told_while_commands_are_carried_out_wait_for_them():
    """Two cores in one process that answer each other: each sees whole turns of the other."""
    done: list[str] = []

    def answer(event: Event) -> list[Command]:
        return [Note("one", {}), Note("two", {})] if event == up("a") else [Note("three", {})]

    def perform(command: Command) -> None:
        if command == Note("one", {}):
            driver.tell(up("b"))
        done.append(command.event)

    core = Recorder(lambda e: [] if isinstance(e, Tick) else answer(e))
    driver = Driver(core, perform, never)
    driver.tell(up("a"))
    assert done == ["one", "two", "three"]
    driver.close()


async def test_a_closed_driver_is_silent():
    core = Recorder()
    driver = Driver(core, lambda command: None, never)
    driver.tell(up("a"))
    driver.close()
    driver.tell(up("b"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert core.events == [up("a")]
    assert core.ticks == 0


async def test_a_fault_of_the_core_costs_one_event_and_no_busy_loop():
    def answer(event: Event) -> list[Command]:
        raise ValueError(type(event).__name__)

    core = Recorder(answer)
    faults: list[Exception] = []
    driver = Driver(core, lambda command: None, faults.append)
    core.deadline = now() - 1
    driver.tell(up("a"))
    driver.tell(up("b"))
    await core.until(lambda: core.ticks == 1)
    assert [str(f) for f in faults] == ["FrontendUp", "FrontendUp", "Tick"]
    for _ in range(20):
        await asyncio.sleep(0)
    assert core.ticks == 1
    core.deadline = None
    core.answer = lambda event: []
    await core.until(lambda: core.ticks >= 2)
    assert len(faults) == 3
    driver.close()

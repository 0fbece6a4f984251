"""What can befall a cluster: one method per kind of fault (scenario.FAULTS)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rtp.core.events import Drain, From, RunnerFailed
from rtp.core.types import FrontendId
from rtp.core.virtual_time import Process
from tests.chaos.network import Partition
from tests.chaos.plant import Plant
from tests.chaos.scenario import MOST_WHO, Fault


class Faults:
    """on_frontend_end(process): told of every frontend that dies."""

    def __init__(
        self, plant: Plant, over_by: float, on_frontend_end: Callable[[Process], None]
    ) -> None:
        """over_by: no partition lasts longer."""
        self._plant = plant
        self._world = plant.world
        self._over_by = over_by
        self._on_frontend_end = on_frontend_end

    def befall(self, fault: Fault) -> None:
        kind: Callable[[Fault], None] = getattr(self, fault.kind)
        kind(fault)

    # ---------------------------------------------------------------- workers

    def kill_worker(self, fault: Fault) -> None:
        self._plant.restart_worker(self._worker(fault), fault.seconds)

    def pause_worker(self, fault: Fault) -> None:
        self._plant.pause(self._worker(fault), fault.seconds)

    def drain_worker(self, fault: Fault) -> None:
        worker = self._worker(fault)
        grace_s = 0.0 if fault.hard else fault.seconds
        if worker.alive:
            self._world.tell(worker, Drain(grace_s))
            self._in(grace_s + 0.1, lambda: self._plant.restart_worker(worker, 0.5))

    def fail_runner(self, fault: Fault) -> None:
        """The process of a Runner is gone; its worker says so for a while and then ends, too."""
        worker = self._worker(fault)
        if worker.alive:
            rank = fault.who % self._plant.shape.ranks
            self._world.tell(worker, RunnerFailed(rank, "fault"))
            self._in(fault.seconds, lambda: self._plant.restart_worker(worker, 0.2))

    def register_again(self, fault: Fault) -> None:
        """A registration arrives twice, or late: of this life or of the one before."""
        register = self._worker(fault).register
        assert register is not None
        if fault.hard and register.epoch > 1:
            register = msgspec.structs.replace(register, epoch=register.epoch - 1)
        if self._plant.master.alive:
            self._world.tell(self._plant.master, From(register.worker_id, register))

    # ---------------------------------------------------------------- Master and frontends

    def kill_master(self, fault: Fault) -> None:
        """A Master of a higher term comes at most 2 s later."""
        if not self._plant.master.alive:
            return
        self._world.kill(self._plant.master)
        if self._plant.shape.with_master:
            for frontend in self._world.frontends.values():
                self._end(frontend)
        self._in(min(fault.seconds, 2.0), self._plant.start_master)

    def pause_master(self, fault: Fault) -> None:
        self._plant.pause(self._plant.master, fault.seconds)
        if self._plant.shape.with_master:
            self._plant.pause(self._frontend(fault), fault.seconds)

    def usurp_master(self, fault: Fault) -> None:
        """The Master stands still, a next one takes over, and the first comes back to find that it
        is nobody's. Workers do not look for a Master while they have one: it has to ask them."""
        old = self._plant.master
        if self._plant.shape.with_master or not old.alive or old.paused:
            self.pause_master(fault)
            return
        self._plant.pause(old, fault.seconds)
        self._plant.asks_workers = True
        self._plant.start_master()
        for frontend in self._world.frontends.values():
            connection = frontend.connections.get(old.name)
            if connection is not None:
                self._world.cut(connection)

    def kill_frontend(self, fault: Fault) -> None:
        if self._plant.shape.with_master:
            self.kill_master(fault)
            return
        frontend = self._frontend(fault)
        if frontend.alive:
            self._end(frontend)
            name = FrontendId(frontend.name)
            self._in(fault.seconds, lambda: self._plant.start_frontend(name))

    def pause_frontend(self, fault: Fault) -> None:
        if self._plant.shape.with_master:
            self.pause_master(fault)
        else:
            self._plant.pause(self._frontend(fault), fault.seconds)

    # ---------------------------------------------------------------- the network

    def cut(self, fault: Fault) -> None:
        """One connection breaks; its ends notice at different times."""
        connections = [
            connection
            for process in (self._plant.master, *self._world.frontends.values())
            for connection in process.connections.values()
            if process.alive and connection.dialler is process and not connection.broken
        ]
        if connections:
            self._world.cut(connections[fault.who % len(connections)])

    def partition(self, fault: Fault) -> None:
        """One process is cut off from all others, or from one or two of them."""
        names = ["master", *self._world.frontends, *self._world.workers]
        if self._plant.shape.with_master:
            names.remove("f0")
        one = names.pop(fault.who % len(names))
        others = sorted(names)[: 1 + fault.who % 2] if fault.who % 3 else names
        until = min(self._world.now + fault.seconds, self._over_by)
        partition = Partition(until, one, frozenset(others), fault.hard, fault.one_way)
        self._plant.network.partitions.append(partition)

    def late_frame(self, fault: Fault) -> None:
        """A report or an order that a connection of before has held back until now: of a life or a
        term that is over, or seen already."""
        frames = self._plant.orders if fault.hard else self._plant.reports
        if not frames:
            return
        lives = {
            name: process.register.epoch
            for name, process in self._world.workers.items()
            if process.register
        }
        over = [frame for frame in frames if frame.epoch < lives.get(frame.source, 0)]
        frame = (over or frames)[fault.who * len(over or frames) // MOST_WHO]
        to = self._world.workers[frame.target] if fault.hard else self._plant.master
        this_life = to.register is None or to.register.epoch == frame.epoch
        if to.alive and not to.paused and this_life:
            self._world.tell(to, From(frame.source, frame.message))

    # ---------------------------------------------------------------- whom it befalls

    def _worker(self, fault: Fault) -> Process:
        workers = list(self._world.workers.values())
        return workers[fault.who % len(workers)]

    def _frontend(self, fault: Fault) -> Process:
        frontends = list(self._world.frontends.values())
        return frontends[fault.who % len(frontends)]

    def _end(self, frontend: Process) -> None:
        self._world.kill(frontend)
        self._on_frontend_end(frontend)

    def _in(self, seconds: float, function: Callable[[], None]) -> None:
        self._world.call(self._world.now + seconds, function)

"""What must be true of the cores: between events, and once all is quiet."""

from __future__ import annotations

from rtp.core.events import Event
from rtp.core.frontend.frontend import Frontend
from rtp.core.master.master import Master
from rtp.core.types import Tier, WorkerId, split_hashes
from rtp.core.virtual_time import Core, Process
from rtp.core.worker.worker import Worker
from tests.chaos.plant import AFFINITY_CHATS, KEPT_PLACEMENTS, Plant
from tests.chaos.scenario import Scenario
from tests.support.keys import low64

OFTEN, SOMETIMES = 4, 16
"""Checks follow one event in so many, the costliest ones fewer. What goes wrong stays wrong."""
MOST_EVENTS = 100_000


class Checks:
    """Counts events and checks behind each."""

    def __init__(self, scenario: Scenario) -> None:
        self.num_events = 0
        self._parents: dict[bytes, bytes] = {}
        """Every block hash there can be, and that of the block before it; b"" before the first."""
        for client in scenario.clients:
            for chain in map(split_hashes, client.chains):
                self._parents |= zip(chain, [b"", *chain], strict=False)

    def after(self, core: Core, event: Event) -> None:
        self.num_events += 1
        assert self.num_events < MOST_EVENTS, "processes talk without end"
        sometimes = self.num_events % SOMETIMES == 0
        if isinstance(core, Master):
            if sometimes:
                core.check()
        elif isinstance(core, Frontend | Worker) and self.num_events % OFTEN == 0:
            core.check()
            if isinstance(core, Worker):
                _check_steps(core)
                if sometimes:
                    self._check_keys(core)

    def quiet(self, plant: Plant) -> None:
        """Nothing is held for anybody, and the Master believes what is true."""
        master, world = plant.master.core, plant.world
        assert isinstance(master, Master)
        master.check()
        assert master.idle(), "the ledger is not zero"
        assert master.map.num_arriving() == 0
        assert master.tenants.num_open == 0, "a tenant's charge is not settled"
        assert len(master.chats) <= AFFINITY_CHATS
        assert len(master.placements.last(100)) <= KEPT_PLACEMENTS
        assert {member.worker_id for member in master.fleet.members} == set(world.workers)
        for frontend in world.frontends.values():
            assert isinstance(frontend.core, Frontend)
            frontend.core.check()
            assert frontend.core.idle()
        for worker in world.workers.values():
            assert isinstance(worker.core, Worker)
            worker.core.check()
            self._check_keys(worker.core)
            assert worker.core.idle(), f"{worker.name} holds something"
            self._check_view(master, worker, plant.shape.num_blocks * plant.shape.block_size)

    def _check_keys(self, worker: Worker) -> None:
        """What a worker shares are blocks of right outputs, with all that precedes them."""
        for rank in worker._ranks:
            keys = set(rank.batcher.blocks.keys())
            for key in keys:
                assert self._parents[key] in keys or not self._parents[key]

    def _check_view(self, master: Master, process: Process, kv_total: int) -> None:
        """What the Master believes of a worker: alive, empty, and these keys."""
        member = master.fleet.members.get(WorkerId(process.name))
        worker = process.core
        assert isinstance(worker, Worker)
        assert member is not None
        assert process.register is not None
        assert member.register.epoch == process.register.epoch
        assert member.usable, f"{process.name} is {member.state}"
        for rank, row in enumerate(member.rows.tolist()):
            keys = worker._ranks[rank].batcher.blocks.keys()
            assert sorted(low64(b"".join(keys))) == master.map.keys(row, Tier.DEVICE)
            reported = master.ranks.reported[:, row]
            assert reported[:5].tolist() == [0, 0, 0, 0, 0], "load is reported where none is"
            assert reported[5:7].tolist() == [kv_total, kv_total]


def _check_steps(worker: Worker) -> None:
    """Ranks that step together have begun the same steps."""
    if worker._card.lockstep:
        begun = {rank.batcher._in_flight._next for rank in worker._ranks if not rank.failed}
        assert len(begun) <= 1, "a rank of a group is a step apart"

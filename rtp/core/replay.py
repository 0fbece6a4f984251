"""A trace through a whole cluster in virtual time: the Master, frontend and workers that serve.

Nothing here decides anything; what a policy does in a replay it does in production. Requests arrive
at their rows' times, or `think_s` after the end of the row they wait for (core/arrivals), both
divided by `speed`; a run is a function of its arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

from rtp.core.arrivals import Arrivals
from rtp.core.commands import Command, Ended, Failed
from rtp.core.events import Begin
from rtp.core.frontend.frontend import Frontend
from rtp.core.master.master import Master
from rtp.core.outcomes import Outcomes
from rtp.core.policy import Routing
from rtp.core.replay_fleet import MODEL, FaultyNetwork, Fleet, ReplayFleet
from rtp.core.replayed import Replayed, replayed
from rtp.core.trace import TraceRow
from rtp.core.types import (
    FrontendId,
    RequestId,
    SamplingParams,
)
from rtp.core.virtual import VirtualCluster
from rtp.core.virtual_time import Process

FRONTEND = FrontendId("f0")
JOINED_S = 1.0
"""By then all workers have joined; the first request comes."""
TIMEOUT_S = 3600.0
STUCK_S = 86_400.0
"""A run that lasts so long after its last arrival is stuck."""
PROGRESS = 200
"""Times that a run tells how far it is."""
ID_BYTES = 4


def replay(
    rows: Sequence[TraceRow],
    fleet: Fleet,
    routing: Routing,
    *,
    speed: float = 1.0,
    decode: bool = True,
    early: bool = False,
    salt: int = 0,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    **master: Any,
) -> Replayed:
    """Runs all rows to their ends. decode: False ends every request with its first token.  early:
    requests are bound as they arrive and queue at their ranks, as most routers do it.  seed: of
    what the fleet draws.  progress: told the share of rows that have ended, now and then.  master:
    options of the Master. Any: as its constructor has them. Raises ConfigError for a fleet that
    cannot be, RuntimeError if the run gets stuck.
    """
    if early:
        master["lead_s"] = inf
    run = _Run(rows, fleet, Master(1, routing, **master), speed, decode, early, salt, seed)
    return run.run(progress)


class _Run:
    def __init__(
        self,
        rows: Sequence[TraceRow],
        fleet: Fleet,
        master: Master,
        speed: float,
        decode: bool,
        early: bool,
        salt: int,
        seed: int,
    ) -> None:
        self._rows = rows
        self._fleet = fleet
        self._master = master
        self._speed = speed
        self._decode = decode
        self._salt = salt
        self._outcomes = Outcomes()
        network = FaultyNetwork(fleet.latency_s)
        self._world = VirtualCluster(network, observe=self._observe)
        self._world.add_master(master)
        frontend = Frontend(FRONTEND, lambda model, skip: _Silent())
        self._frontend = self._world.add_frontend(FRONTEND, frontend, with_master=True)
        workers = ReplayFleet(fleet, self._world, network, JOINED_S, seed)
        workers.begin(registered_rows=0 if early else fleet.max_rows)
        self._block_size = workers.block_size
        self._arrivals = Arrivals(rows)
        self._index_of: dict[RequestId, int] = {}
        self._last_due_s = JOINED_S
        self._progress: Callable[[float], None] | None = None

    def run(self, progress: Callable[[float], None] | None) -> Replayed:
        self._progress = progress
        self._world.run(JOINED_S)
        self._plan_next()
        count = len(self._rows)
        self._world.run_while(
            lambda: (
                self._outcomes.num_over < count and self._world.now <= self._last_due_s + STUCK_S
            )
        )
        if self._outcomes.num_over < count:
            raise RuntimeError(f"{count - self._outcomes.num_over} requests never ended")
        return self._result()

    # ------------------------------------------------------------ requests

    def _plan_next(self) -> None:
        at = self._arrivals.next_s()
        if at is not None:
            self._plan(JOINED_S + at / self._speed, self._begin_due)

    def _begin_due(self) -> None:
        """All rows of this instant."""
        for index in self._arrivals.take():
            self._tell_begin(index)
        self._plan_next()

    def _tell_begin(self, index: int) -> None:
        self._world.tell(self._frontend, self._begin(index, self._rows[index]))

    def _observe(self, process: Process, command: Command) -> None:
        self._outcomes.take(command, self._world.now)
        if isinstance(command, Ended | Failed):
            over, count = self._outcomes.num_over, len(self._rows)
            if self._progress is not None and over * PROGRESS % count < PROGRESS:
                self._progress(over / count)
            for index in self._arrivals.behind(self._index_of[command.request_id]):
                at = self._world.now + self._rows[index].think_s / self._speed
                self._plan(at, partial(self._tell_begin, index))

    def _plan(self, at: float, begin: Callable[[], None]) -> None:
        self._last_due_s = max(self._last_due_s, at)
        self._world.call(at, begin)

    def _begin(self, index: int, row: TraceRow) -> Begin:
        request_id = RequestId(f"r{index}")
        self._index_of[request_id] = index
        self._outcomes.begin(request_id, self._world.now)
        return Begin(
            request_id=request_id,
            model=MODEL,
            tenant=row.tenant,
            chat_id=f"s{row.session}" if row.session >= 0 else "",
            prompt=bytes(ID_BYTES * row.num_tokens),
            hashes=row.hashes(self._block_size, self._salt),
            # Of its own: what it generates, or leaves of a block, is shared with nobody.
            namespace=bytes(1) + index.to_bytes(31, "big"),
            sampling=SamplingParams(
                max_tokens=row.num_output if self._decode else 1, temperature=0.0, ignore_eos=True
            ),
            timeout_s=TIMEOUT_S,
        )

    def _result(self) -> Replayed:
        return replayed(
            self._rows,
            [self._outcomes.by_id[RequestId(f"r{index}")] for index in range(len(self._rows))],
            self._fleet.places(),
            start_s=JOINED_S,
            num_holds=sum(pool.window.num_holds for pool in self._master.fleet.pools.values()),
            num_fallbacks=self._master.placements.num_fallbacks,
            last_fallback=self._master.placements.last_fallback,
        )


class _Silent:
    """A Detokenizer for requests whose text nobody reads: the first token shows, so that it is
    delivered when it comes; the others are, with the end."""

    def __init__(self) -> None:
        self._piece = "."

    def push(self, token: int) -> str:
        piece, self._piece = self._piece, ""
        return piece

    def flush(self) -> str:
        return ""

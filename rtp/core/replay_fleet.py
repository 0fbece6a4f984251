"""The cluster that a trace is replayed on: workers of any role, and what goes wrong with them.

The workers are the cores that serve. A fault is told by its time, its kind, whom it strikes (a
worker `w3`, one of its ranks `w3/0`, or `*` for all) and a number:

    lost  the worker's process ends, with its cache      back  its next life begins, empty
    slow  its steps take so many times as long           late  its reports take so much longer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from random import Random

from rtp.core.errors import ConfigError
from rtp.core.messages import Register
from rtp.core.ports import Runner, Transport
from rtp.core.steps import StepPlan, StepResult
from rtp.core.types import Role, WorkerId
from rtp.core.virtual import MASTER, Network, VirtualCluster
from rtp.core.virtual_time import Process
from rtp.core.worker.worker import Worker

MODEL = "trace"
KINDS = {"lost": False, "back": False, "slow": True, "late": True}
"""Kinds of faults, and whether they have a number: over 0 of slow, from 0 up of late."""
ALL = "*"
LETTER = {Role.FUSION: "w", Role.PREFILL: "p", Role.DECODE: "d"}
SPREAD = 3**0.5
"""Half the width of a uniform distribution over its standard deviation."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong, or right again."""

    at_s: float
    """Since the first arrival."""
    what: str
    which: str
    number: float = 0.0


def fault(text: str) -> Fault:
    """AT:WHAT:WHICH[:NUMBER], as in 600:lost:w3 or 0:slow:w0/1:2. Raises ConfigError."""
    parts = text.split(":")
    try:
        at_s, what, which, *number = parts
        found = Fault(float(at_s), what, which, float(number[0]) if number else 0.0)
    except ValueError:
        raise ConfigError(f"fault {text!r} is not AT:WHAT:WHICH[:NUMBER]") from None
    if what not in KINDS:
        raise ConfigError(f"fault {text!r}: no kind {what!r}; there are {', '.join(KINDS)}")
    right = all(isfinite(value) and value >= 0 for value in (found.at_s, found.number))
    right &= what != "slow" or found.number > 0
    if KINDS[what] != bool(number) or len(number) > 1 or not right:
        wanted = {"slow": "a time and a number over 0", "late": "a time and a number from 0 up"}
        raise ConfigError(f"fault {text!r}: {what} has {wanted.get(what, 'a time and no number')}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal ranks; workers that prefill and decode, and those that do one of the two."""

    runner: Callable[[], Runner]
    """Makes one rank's Runner; block_size is the trace's."""
    profile: tuple[float, ...] = ()
    """Coefficients that a worker registers as measured (core/master/predictor)."""
    workers: int = 8
    """That do both, w0 and on."""
    prefill_workers: int = 0
    """p0 and on."""
    decode_workers: int = 0
    """d0 and on."""
    ranks: int = 1
    """Of each worker."""
    lockstep: bool = False
    """The ranks of a worker step together."""
    transport: Transport | None = None
    """How KV gets from rank to rank, for its times; needed where workers have roles."""
    max_batch_tokens: int = 8192
    chunk_while_decoding: int = 2048
    """Prompt tokens of a step that decodes as well."""
    max_rows: int = 64
    latency_s: float = 0.0002
    """Of one message."""
    service_error: float = 0.0
    """Standard deviation of what a step takes over what it should, uniform around 1."""
    faults: tuple[Fault, ...] = ()

    @property
    def roles(self) -> list[tuple[WorkerId, Role]]:
        counts = {
            Role.FUSION: self.workers,
            Role.PREFILL: self.prefill_workers,
            Role.DECODE: self.decode_workers,
        }
        return [
            (WorkerId(f"{LETTER[role]}{index}"), role)
            for role, count in counts.items()
            for index in range(count)
        ]

    @property
    def num_ranks(self) -> int:
        return self.ranks * len(self.roles)

    def places(self) -> dict[tuple[str, int], int]:
        """Each rank's number, counted over the fleet."""
        ranks = [(worker, rank) for worker, _ in self.roles for rank in range(self.ranks)]
        return {place: number for number, place in enumerate(ranks)}

    def check(self) -> None:
        """Raises ConfigError where this is no cluster that can serve."""
        split = bool(self.prefill_workers or self.decode_workers)
        if not self.roles:
            raise ConfigError("a cluster needs workers")
        if split and not self.workers and not (self.prefill_workers and self.decode_workers):
            raise ConfigError("prefill and decode workers need each other, or workers of both")
        if split and self.transport is None:
            raise ConfigError("workers with roles need a transport: how fast their KV moves")
        if not 0 <= self.service_error * SPREAD < 1:
            raise ConfigError(f"service_error is from 0 to 0.57, not {self.service_error}")
        workers, ranks = dict(self.roles), {f"{name}/{rank}" for name, rank in self.places()}
        for each in self.faults:
            worker, _, rank = each.which.partition("/")
            known = each.which == ALL or (worker in workers and not rank)
            if each.what == "slow":
                known |= each.which in ranks
            if not known:
                raise ConfigError(f"fault {each.what} strikes {each.which!r}, which there is not")
            if each.what == "back" and not any(
                lost.what == "lost"
                and lost.at_s <= each.at_s
                and (ALL in (lost.which, each.which) or lost.which == each.which)
                for lost in self.faults
            ):
                raise ConfigError(f"fault back: {each.which} was not lost before {each.at_s:g} s")


class FaultyNetwork(Network):
    """Messages to the Master of some workers take longer."""

    def __init__(self, latency_s: float) -> None:
        super().__init__(latency_s)
        self.late_s: dict[str, float] = {}

    def delay_s(self, source: str, target: str) -> float | None:
        return self.latency_s + (self.late_s.get(source, 0.0) if target == MASTER else 0.0)


class ReplayFleet:
    """The workers of a world: made at once, struck by the faults when their time comes."""

    def __init__(
        self, fleet: Fleet, world: VirtualCluster, network: FaultyNetwork, start_s: float, seed: int
    ) -> None:
        """start_s: the world's time of the first arrival.  max_rows 0 in a registration: the Master
        does not know how many rows a rank has, and binds requests whatever runs there."""
        fleet.check()
        self._fleet = fleet
        self._world = world
        self._network = network
        self._paces: dict[tuple[str, int], _Paced] = {}
        self._epochs: dict[str, int] = {}
        self._lives: dict[str, Process] = {}
        self._random = Random(seed)
        self._start_s = start_s
        self.block_size = 0

    def begin(self, *, registered_rows: int) -> None:
        self._registered_rows = registered_rows
        for worker_id, role in self._fleet.roles:
            self._start(worker_id, role)
        for each in self._fleet.faults:
            self._plan(each)

    def _plan(self, each: Fault) -> None:
        self._world.call(self._start_s + each.at_s, lambda: self._strike(each))

    def _strike(self, each: Fault) -> None:
        worker, _, rank = each.which.partition("/")
        struck = [(name, role) for name, role in self._fleet.roles if each.which in (ALL, name)]
        match each.what:
            case "lost":
                for name, _ in struck:
                    self._world.kill(self._lives[name])
            case "back":
                for name, role in struck:
                    if not self._lives[name].alive:
                        self._start(name, role)
            case "late":
                self._network.late_s |= {name: each.number for name, _ in struck}
            case "slow":
                for (owner, index), pace in self._paces.items():
                    if each.which in (ALL, owner) or (worker, rank) == (owner, str(index)):
                        pace.factor = each.number

    def _start(self, worker_id: WorkerId, role: Role) -> None:
        """A worker's first life, or its next one."""
        fleet = self._fleet
        epoch = self._epochs[worker_id] = self._epochs.get(worker_id, 0) + 1
        runners: list[Runner] = []
        for rank in range(fleet.ranks):
            before = self._paces.get((worker_id, rank))
            pace = _Paced(
                fleet.runner(),
                Random(self._random.random()),
                fleet.service_error,
                1.0 if before is None else before.factor,
            )
            self._paces[worker_id, rank] = pace
            runners.append(pace)
        capacity = runners[0].capacity
        self.block_size = capacity.block_size
        moves = fleet.transport
        card = Register(
            worker_id=worker_id,
            epoch=epoch,
            address=f"{worker_id}:{epoch}",
            role=role,
            ranks=fleet.ranks,
            kv_total=tuple(r.capacity.num_blocks * capacity.block_size for r in runners),
            block_size=capacity.block_size,
            model=MODEL,
            max_model_len=capacity.max_model_len,
            card="card",
            kv_format=capacity.kv_format,
            key_id="key",
            max_batch_tokens=fleet.max_batch_tokens,
            max_rows=self._registered_rows,
            profile=fleet.profile,
            prefix_closed=True,
            lockstep=fleet.lockstep,
            transports=() if moves is None else ("sim",),
            transfer=(0.0, 0.0) if moves is None else (moves.latency_s, moves.tokens_per_s),
        )
        worker = Worker(
            card,
            [runner.capacity for runner in runners],
            max_batch_tokens=fleet.max_batch_tokens,
            chunk_while_decoding=min(fleet.chunk_while_decoding, fleet.max_batch_tokens),
            max_rows=fleet.max_rows,
        )
        self._lives[worker_id] = self._world.add_worker(card, worker, runners, transport=moves)


class _Paced:
    """A Runner that takes longer or shorter than it says."""

    def __init__(self, runner: Runner, random: Random, error: float, factor: float) -> None:
        self.capacity = runner.capacity
        self.factor = factor
        self._runner = runner
        self._random = random
        self._width = error * SPREAD

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._runner.execute(plan)
        factor = self.factor
        if self._width:
            factor *= 1.0 + self._width * (2.0 * self._random.random() - 1.0)
        if factor == 1.0:
            return result
        return StepResult(result.step, result.rows, factor * result.elapsed_s)

    def close(self) -> None:
        self._runner.close()

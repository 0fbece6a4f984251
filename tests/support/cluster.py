"""Builders of whole clusters in virtual time, and of requests for them.

    cluster = a_cluster(workers=2, routing="predicted_ttft")
    first = cluster.run(a_request(tokens=range(512), at=0.0))
    assert first.rank_id == "w0/0"

Times given to and read from a Cluster count from the moment when all its workers have joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from rtp.backends import sim
from rtp.backends.transport import sim as sim_transport
from rtp.core import plugins
from rtp.core.commands import Command
from rtp.core.events import Begin, ClientGone
from rtp.core.frontend.frontend import Frontend
from rtp.core.hashing import block_hashes, namespace
from rtp.core.master.master import Master
from rtp.core.messages import Register
from rtp.core.outcomes import Outcome, Outcomes
from rtp.core.types import FrontendId, RequestId, Role, SamplingParams, WorkerId, pack_ids
from rtp.core.virtual import Network, VirtualCluster
from rtp.core.virtual_time import Process
from rtp.core.worker.worker import Worker
from tests.support.oracles import Signs

MODEL = "sim"
SEED = namespace(secret=b"tests", revision="sim")
WARM_UP_S = 1.0
Options = dict[str, Any]  # Any: keyword arguments of constructors


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request to come."""

    at: float
    tokens: tuple[int, ...]
    sampling: SamplingParams
    fields: Options

    def begin(self, request_id: RequestId, block_size: int) -> Begin:
        prompt = pack_ids(self.tokens)
        return Begin(
            request_id=request_id,
            model=MODEL,
            prompt=prompt,
            hashes=block_hashes(prompt, block_size, SEED),
            namespace=SEED,
            sampling=self.sampling,
            **self.fields,
        )


def a_request(
    *,
    tokens: Iterable[int],
    at: float = 0.0,
    max_tokens: int = 8,
    sampling: SamplingParams | None = None,
    **fields: Any,
) -> Planned:
    """fields: of Begin (n, stop, chat_id, priority, timeout_s, ...). Greedy unless told."""
    sampling = sampling or SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Planned(at=at, tokens=tuple(tokens), sampling=sampling, fields=fields)


class Cluster:
    """A Master, a frontend in its process, and workers with simulated Runners."""

    def __init__(
        self,
        *,
        workers: int,
        ranks: int,
        lockstep: bool,
        routing: str,
        network: Network,
        runner: Options,
        worker: Options,
        master: Options,
        seed: int,
        roles: Sequence[Role],
        transfer: tuple[float, float],
        register: Options,
    ) -> None:
        self.outcomes = Outcomes()
        self.commands: list[tuple[float, str, Command]] = []
        """Everything the cores asked for: time, who, what."""
        self.world = VirtualCluster(network, observe=self._observe)
        self._runner, self._worker = runner, worker
        self._ranks = ranks
        self._transport = sim_transport.build(latency_s=transfer[0], tokens_per_s=transfer[1])
        self._register = {
            "lockstep": lockstep,
            "transports": ("sim",),
            "transfer": (self._transport.latency_s, self._transport.tokens_per_s),
        } | register
        self._num_requests = 0
        policy = plugins.build(
            "routing", routing, **({"seed": seed} if routing == "random" else {})
        )
        self.master = Master(1, policy, **master)
        self.frontend = Frontend(FrontendId("f0"), lambda model, skip: Signs())
        self.workers: dict[WorkerId, Worker] = {}
        self.world.add_master(self.master)
        self.world.add_frontend(FrontendId("f0"), self.frontend, with_master=True)
        for index in range(workers):
            self.start_worker(WorkerId(f"w{index}"), role=roles[index % len(roles)])
        self.world.run(WARM_UP_S)

    @property
    def now(self) -> float:
        return self.world.now - WARM_UP_S

    def start_worker(self, worker_id: WorkerId, epoch: int = 1, **register: Any) -> Process:
        """A worker, or its next life."""
        runners = [sim.build(**self._runner) for _ in range(self._ranks)]
        card = a_register(worker_id, epoch, runners, **(self._register | register))
        capacities = [runner.capacity for runner in runners]
        core = self.workers[worker_id] = Worker(card, capacities, **self._worker)
        return self.world.add_worker(card, core, runners, transport=self._transport)

    def begin(self, planned: Planned) -> Outcome:
        """Schedules the request; what becomes of it shows in the Outcome as time passes."""
        request_id = RequestId(f"r{self._num_requests}")
        self._num_requests += 1
        at = max(planned.at + WARM_UP_S, self.world.now)
        block_size = self._runner.get("block_size", 16)
        self.world.tell(self.world.frontends["f0"], planned.begin(request_id, block_size), at)
        return self.outcomes.begin(request_id, at)

    def run(self, planned: Planned) -> Outcome:
        """Begins the request and lets time pass until it has ended."""
        return self.run_all([planned])[0]

    def run_all(self, planned: Sequence[Planned]) -> list[Outcome]:
        outcomes = [self.begin(one) for one in planned]
        limit = self.world.now + 1000 + max((one.at for one in planned), default=0.0)
        self.world.run_while(lambda: not all(o.over or o.left for o in outcomes), limit)
        assert all(o.over or o.left for o in outcomes), "a request never ended"
        return outcomes

    def leave(self, outcome: Outcome, at: float) -> None:
        """The client of a request goes away."""

        def gone() -> None:
            outcome.left = not outcome.over
            self.world.tell(self.world.frontends["f0"], ClientGone(outcome.request_id))

        self.world.call(at + WARM_UP_S, gone)

    def pass_time(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def _observe(self, process: Process, command: Command) -> None:
        self.commands.append((self.world.now, process.name, command))
        self.outcomes.take(command, self.world.now)


def a_cluster(
    *,
    workers: int = 2,
    ranks: int = 1,
    lockstep: bool = False,
    routing: str = "predicted_ttft",
    network: Network | None = None,
    runner: Options | None = None,
    worker: Options | None = None,
    master: Options | None = None,
    seed: int = 0,
    roles: Sequence[Role] = (Role.FUSION,),
    transfer: tuple[float, float] = (0.002, 1.0e6),
    register: Options | None = None,
) -> Cluster:
    """runner: of backends.sim.build; worker, master: of their constructors. roles: of the workers,
    in turn. transfer: seconds of latency and tokens per second between them. register: of their
    registrations."""
    return Cluster(
        workers=workers,
        ranks=ranks,
        lockstep=lockstep,
        routing=routing,
        network=network or Network(),
        runner=runner or {},
        worker=worker or {},
        master={"max_ranks": 64, **(master or {})},
        seed=seed,
        roles=roles,
        transfer=transfer,
        register=register or {},
    )


def a_register(worker_id: WorkerId, epoch: int, runners: Sequence[Any], **fields: Any) -> Register:
    """The registration of a worker with these Runners."""
    capacity = runners[0].capacity
    defaults = sim.build.__kwdefaults__ or {}  # of its cost model: what a worker would measure
    profile = tuple(defaults[name] for name in "abcdef")
    known: Options = {
        "worker_id": worker_id,
        "epoch": epoch,
        "address": f"{worker_id}:1",
        "role": Role.FUSION,
        "ranks": len(runners),
        "kv_total": tuple(r.capacity.num_blocks * capacity.block_size for r in runners),
        "block_size": capacity.block_size,
        "model": MODEL,
        "max_model_len": capacity.max_model_len,
        "card": "card",
        "kv_format": capacity.kv_format,
        "key_id": "key",
        "max_batch_tokens": 512,
        "profile": profile,
        "prefix_closed": True,
    }
    return Register(**(known | fields))


def random_tokens(random: Random, count: int, vocab_size: int = 1000) -> tuple[int, ...]:
    return tuple(random.randrange(3, vocab_size) for _ in range(count))

"""A Master and pretended workers, driven by hand: what each worker reports is said by the test."""

from __future__ import annotations

import itertools

import numpy as np

from rtp.core import plugins
from rtp.core.commands import Command, Note, Send
from rtp.core.events import Event, From, LinkDown, LinkUp, Tick
from rtp.core.hashing import block_hashes, namespace
from rtp.core.master.master import Master
from rtp.core.messages import (
    STATUS_COLUMNS,
    Ask,
    Cancel,
    Delta,
    Fence,
    Finished,
    FirstToken,
    Grant,
    GroupCost,
    KeyChange,
    Message,
    Poll,
    Refuse,
    Register,
    Snapshot,
    Status,
)
from rtp.core.policy import Routing
from rtp.core.types import FrontendId, Hashes, RequestId, Role, Tier, WorkerId, pack_ids
from rtp.core.worker.reports import SeenGrants

BLOCK = 16
SEED = namespace(secret=b"test", revision="r")
FRONTEND = FrontendId("f")
PROFILE = (1e-3, 1e-5, 1e-10, 1e-3, 1e-4, 1e-8)
"""10 us a prompt token: 1,000 tokens in 11 ms."""


def hashes_of(tokens: range | list[int], block_size: int = BLOCK) -> Hashes:
    return block_hashes(pack_ids(tokens), block_size, SEED)


class Worker:
    """What one pretended worker knows: the grants that reached it, what it reports next."""

    def __init__(self, register: Register) -> None:
        self.register = register
        self.id, self.epoch = register.worker_id, register.epoch
        self.seq = -1
        self.version = 0
        self.seen = [SeenGrants() for _ in range(register.ranks)]
        self.load: list[dict[str, int]] = [{} for _ in range(register.ranks)]
        self.draining = False
        self.hung = False
        self.parked: tuple[RequestId, ...] = ()
        self.group: GroupCost | None = None

    def see(self, grant: Grant) -> None:
        """A Submit with this number arrived."""
        self.seen[grant.rank].add(grant.number)

    def has_seen(self, rank: int, number: int) -> bool:
        seen = self.seen[rank]
        return number <= seen.upto or bool(seen.mask >> number - seen.upto - 1 & 1)

    def status(self, term: int, firsts: tuple = (), finished: tuple = ()) -> Status:
        self.seq += 1
        table = np.zeros((self.register.ranks, len(STATUS_COLUMNS)), dtype="<i8")
        for rank, total in enumerate(self.register.kv_total):
            upto, mask = self.seen[rank].columns()
            facts = {
                "kv_free": total,
                "kv_total": total,
                "granted_upto": upto,
                "granted_mask": mask,
            } | self.load[rank]
            table[rank] = [facts.get(name, 0) for name in STATUS_COLUMNS]
        return Status(
            self.id,
            self.epoch,
            term,
            self.seq,
            table.tobytes(),
            firsts,
            finished,
            self.draining,
            self.hung,
            self.parked,
            self.group,
        )


class Fleet:
    """Master, workers and one frontend at one instant `now`; every command is kept in `out`."""

    def __init__(
        self,
        routing: str | Routing = "predicted_ttft",
        term: int = 1,
        check: bool = True,
        **settings: object,
    ) -> None:
        policy = plugins.build("routing", routing) if isinstance(routing, str) else routing
        self._check = check
        self.master = Master(term, policy, **{"max_ranks": 64} | settings)
        self.term = term
        self.now = 100.0
        self.out: list[Command] = []
        self.workers: dict[str, Worker] = {}
        self._ids = itertools.count()

    # ------------------------------------------------------------ driving

    def tell(self, event: Event, tick: bool = True) -> list[Command]:
        """One event and, by default, the Tick behind it. Returns the commands of both."""
        out = list(self.master.handle(event, self.now))
        if tick:
            out += self.master.handle(Tick(), self.now)
        self.out += out
        if self._check:
            self.master.check()
        return out

    def tick(self) -> list[Command]:
        return self.tell(Tick(), tick=False)

    def wait(self, seconds: float, beat: bool = True) -> list[Command]:
        """Time passes as a driver lets it: a Tick at each deadline; workers beat."""
        start, end = len(self.out), self.now + seconds
        next_beat = self.now
        while True:
            deadline = self.master.next_deadline()
            at = max(self.now, deadline) if deadline is not None else end + 1
            if beat and next_beat <= min(at, end):
                self.now = max(self.now, next_beat)
                next_beat += 0.2
                for worker in self.workers.values():
                    self.report(worker)
                continue
            if at > end:
                break
            self.now = at
            self.tick()
        self.now = end
        return self.out[start:]

    # ------------------------------------------------------------ workers

    def add(self, name: str = "w0", *, join: bool = True, **fields: object) -> Worker:
        """Registers a worker; with `join` it is linked and has reported once."""
        facts: dict = {
            "worker_id": WorkerId(name),
            "epoch": 1,
            "address": f"10.0.0.1:{9000 + len(self.workers)}",
            "role": Role.FUSION,
            "ranks": 1,
            "kv_total": (100_000,),
            "block_size": BLOCK,
            "model": "m",
            "max_model_len": 32_768,
            "card": "card",
            "kv_format": "bf16",
            "key_id": "key",
            "max_batch_tokens": 2048,
            "profile": PROFILE,
        } | fields
        if "ranks" in fields and "kv_total" not in fields:
            facts["kv_total"] = (100_000,) * facts["ranks"]
        worker = Worker(Register(**facts))
        self.workers[name] = worker
        self.tell(From(name, worker.register))
        if join:
            self.link(worker)
            self.report(worker)
        return worker

    def link(self, worker: Worker) -> list[Command]:
        return self.tell(LinkUp(worker.id, worker.epoch))

    def unlink(self, worker: Worker) -> list[Command]:
        return self.tell(LinkDown(worker.id, worker.epoch))

    def report(
        self, worker: Worker, *, firsts: tuple = (), finished: tuple = (), **load: int
    ) -> list[Command]:
        """A Status; `load` are columns of rank 0 that stay."""
        worker.load[0] |= load
        return self.tell(From(worker.id, worker.status(self.term, firsts, finished)))

    def store(self, worker: Worker, hashes: Hashes, rank: int = 0, tier: Tier = Tier.DEVICE):
        """The worker's cache gained blocks."""
        if not worker.version:
            self.snapshot(worker)
        change = KeyChange(rank, tier, hashes, b"")
        worker.version += 1
        return self.tell(
            From(
                worker.id,
                Delta(worker.id, worker.epoch, worker.version - 1, worker.version, (change,)),
            )
        )

    def snapshot(self, worker: Worker, *slices: Hashes) -> list[Command]:
        worker.version += 1
        out = []
        parts = slices or (b"",)
        for i, part in enumerate(parts):
            change = KeyChange(0, Tier.DEVICE, part, b"")
            frame = Snapshot(worker.id, worker.epoch, worker.version, i, len(parts), (change,))
            out += self.tell(From(worker.id, frame))
        return out

    def finish(self, grant: Grant, reason: str = "done", generated: int = 10) -> list[Command]:
        """The granted attempt ends on its worker, which tells so in a Status."""
        end = Finished(grant.request_id, grant.attempt, reason, 100, 0, generated)
        worker = self.workers[grant.worker_id]
        worker.see(grant)
        return self.report(worker, finished=(end,))

    def first_token(self, grant: Grant, new: int, cached: int, prefill_s: float) -> list[Command]:
        first = FirstToken(grant.request_id, grant.attempt, new, cached, prefill_s, 0.0)
        worker = self.workers[grant.worker_id]
        worker.see(grant)
        return self.report(worker, firsts=(first,))

    # ------------------------------------------------------------ requests

    def ask(
        self, tokens: range | list[int] | int = 100, *, tick: bool = True, **fields: object
    ) -> RequestId:
        """A number stands for that many tokens nobody else has."""
        number = next(self._ids)
        if isinstance(tokens, int):
            tokens = range(10_000_000 + number * 100_000, 10_000_000 + number * 100_000 + tokens)
        facts: dict = {
            "frontend_id": FRONTEND,
            "request_id": RequestId(f"r{number:05d}"),
            "attempt": 1,
            "model": "m",
            "tenant": "t",
            "chat_id": "",
            "priority": 0,
            "hashes": hashes_of(tokens),
            "num_tokens": len(tokens),
            "max_tokens": 16,
            "n": 1,
            "deadline_s": 600.0,
        } | fields
        self.tell(From(facts["frontend_id"], Ask(**facts)), tick)
        return facts["request_id"]

    def cancel(self, request_id: RequestId, attempt: int = 1, generated: int = 0) -> list[Command]:
        return self.tell(From(FRONTEND, Cancel(request_id, attempt, "gone", generated)))

    def grant(self, request_id: RequestId) -> Grant | None:
        """The newest grant of a request."""
        grants = [g for g in self.grants() if g.request_id == request_id]
        return grants[-1] if grants else None

    def refusal(self, request_id: RequestId) -> Refuse | None:
        refusals = [r for r in self.sent(Refuse) if r.request_id == request_id]
        return refusals[-1] if refusals else None

    def grants(self) -> list[Grant]:
        return self.sent(Grant)

    def sent(self, kind: type[Message], commands: list[Command] | None = None) -> list:
        """Messages of one kind among the commands, of all so far by default."""
        sends = [c for c in (self.out if commands is None else commands) if isinstance(c, Send)]
        return [c.message for c in sends if isinstance(c.message, kind)]

    def notes(self, event: str) -> list[Note]:
        return [c for c in self.out if isinstance(c, Note) and c.event == event]

    def state(self, name: str) -> str:
        """Of a present worker, or of the last one with that name that left."""
        overview = self.master.overview(self.now)
        if name in overview["workers"]:
            return overview["workers"][name]["state"]
        return [d["state"] for d in overview["departed"] if d["worker_id"] == name][-1]


__all__ = ["BLOCK", "FRONTEND", "Fence", "Fleet", "Poll", "Worker", "hashes_of"]

"""The asyncio driver of core.worker: Runners, the Master's link, frontends' streams, transfers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rtp.core.commands import Command, Note, Pull, RunStep, Send
from rtp.core.errors import TransferFailed
from rtp.core.events import (
    Drain,
    From,
    FrontendDown,
    FrontendUp,
    MasterDown,
    MasterUp,
    Pulled,
    RunnerFailed,
    Stalled,
    StepDone,
)
from rtp.core.messages import Register
from rtp.core.ports import Transport
from rtp.core.types import FrontendId
from rtp.io.codec import FrameDecoder, FromFrontend, ToWorker
from rtp.io.connection import FrameConnection
from rtp.io.driver import Core, Driver, fault_note
from rtp.io.handshake import Claim
from rtp.io.runner_process import Broken, Done, FromRunner, RunnerHandle
from rtp.io.stall import StallWatch

MASTER = "master"
MAX_FRONTENDS = 64
MAX_STREAM_UNSENT_BYTES = 16 << 20


class WorkerCore(Core, Protocol):
    def overview(self) -> dict[str, Any]: ...  # Any: JSON

    @property
    def drained(self) -> bool: ...


@dataclass(slots=True)
class WorkerLoop:
    """Drives one worker. Build inside the running loop, with the Runners started and their events
    going to runner_event().

    on_note: gets every Note.  on_fatal(reason): a Runner is gone, the process has to end.
    """

    core: WorkerCore
    register: Register
    runners: Sequence[RunnerHandle]
    on_note: Callable[[Note], None]
    on_fatal: Callable[[str], None]
    transport: Transport | None = None
    """Brings pages of other workers."""
    linked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a Master's link is up, `unlinked` while none is."""
    unlinked: asyncio.Event = field(default_factory=asyncio.Event)
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a drain has nothing left to wait for."""
    draining: bool = False
    failed: str = ""
    _closed: bool = False
    _term: int = -1
    _link: FrameConnection | None = None
    _streams: dict[FrontendId, FrameConnection] = field(default_factory=dict)
    _pulls: set[asyncio.Task[None]] = field(default_factory=set)
    driver: Driver = field(init=False)
    stall: StallWatch = field(init=False)

    def __post_init__(self) -> None:
        self.unlinked.set()
        self.driver = Driver(self.core, self._perform, self._fault, self._after_turn)
        self.stall = StallWatch(self.register.profile, self.on_note, self._stalled, self._fail)

    async def close(self) -> None:
        """Ends connections and Runners; peers that try again meanwhile are refused."""
        self._closed = True
        self.driver.close()
        self.stall.close()
        for task in self._pulls:
            task.cancel()
        for connection in [self._link, *self._streams.values()]:
            if connection is not None:
                connection.close()
        await asyncio.gather(*(runner.close() for runner in self.runners))

    def drain(self, grace_s: float) -> None:
        """Stops accepting; the core gives up what still runs after `grace_s`."""
        self.draining = True
        self.driver.tell(Drain(grace_s))

    def ready(self) -> str:
        """Why no work should come here; '' when it should."""
        if self.failed:
            return self.failed
        if self.draining:
            return "draining"
        if not self.linked.is_set():
            return "no Master"
        return self.stall.stalled()

    def facts(self) -> dict[str, Any]:  # Any: JSON
        """What GET /status shows."""
        about = self.register
        return {
            "worker_id": about.worker_id,
            "epoch": about.epoch,
            "model": about.model,
            "role": str(about.role),
            "reason_not_ready": self.ready(),
            "term": self._term,
            "frontends": len(self._streams),
            "loop": self.driver.times.as_dict(),
            **self.core.overview(),
        }

    def runner_event(self, rank: int, event: FromRunner) -> None:
        """What the Runner of a rank says once it is ready."""
        if isinstance(event, Done):
            self.stall.done(rank, event.result.step)
            self.driver.tell(StepDone(rank, event.result))
        elif isinstance(event, Broken):
            self.driver.tell(RunnerFailed(rank, event.reason))
            end = "; the ranks that step with it end too" if self.register.lockstep else ""
            self._fail(f"rank {rank}: {event.reason}{end}")

    # ------------------------------------------------------------ connections

    def admit_link(self, claim: Claim) -> str:
        """Why a Master's link is refused; '' if it is not. A lower term than one proved is."""
        if not claim.peer.isdecimal():
            return "a term is a number"
        if int(claim.peer) < self._term:
            return f"a Master of term {self._term} was here; yours is {claim.peer}"
        return self._this_life(claim)

    def open_link(self, claim: Claim) -> FrameConnection:
        """A proved link; it takes the place of an earlier one."""
        if self._link is not None:
            self._link.abort("another link took its place")
            self._master_down(self._link, "another link took its place")
        self._term = int(claim.peer)
        link = FrameConnection(
            FrameDecoder(ToWorker),
            lambda message: self.driver.tell(From(MASTER, message)),
            lambda reason: self._master_down(link, reason),
        )
        self._link = link
        self.linked.set()
        self.unlinked.clear()
        self._note("link.opened", term=self._term)
        self.driver.tell(MasterUp(self._term))
        return link

    def admit_stream(self, claim: Claim) -> str:
        """Why a frontend's stream is refused; '' if it is not."""
        if len(self._streams) >= MAX_FRONTENDS and claim.peer not in self._streams:
            return f"{MAX_FRONTENDS} frontends are connected"
        return self._this_life(claim)

    def open_stream(self, claim: Claim) -> FrameConnection:
        """A proved stream; it takes the place of this frontend's earlier one."""
        frontend_id = FrontendId(claim.peer)
        earlier = self._streams.get(frontend_id)
        if earlier is not None:
            earlier.abort("another stream took its place")
            self._stream_down(frontend_id, earlier, "another stream took its place")
        stream = FrameConnection(
            FrameDecoder(FromFrontend),
            lambda message: self.driver.tell(From(frontend_id, message)),
            lambda reason: self._stream_down(frontend_id, stream, reason),
            MAX_STREAM_UNSENT_BYTES,
        )
        self._streams[frontend_id] = stream
        self._note("stream.opened", frontend_id=frontend_id)
        self.driver.tell(FrontendUp(frontend_id))
        return stream

    def _this_life(self, claim: Claim) -> str:
        if self._closed:
            return "this worker ends"
        if (claim.worker_id, claim.epoch) != (self.register.worker_id, self.register.epoch):
            return f"this is {self.register.worker_id}, epoch {self.register.epoch}"
        return ""

    def _master_down(self, link: FrameConnection, reason: str) -> None:
        if self._link is link:
            self._link = None
            self.linked.clear()
            self.unlinked.set()
            self._note("link.closed", reason=reason)
            self.driver.tell(MasterDown())

    def _stream_down(self, frontend_id: FrontendId, stream: FrameConnection, reason: str) -> None:
        if self._streams.get(frontend_id) is stream:
            del self._streams[frontend_id]
            self._note("stream.closed", frontend_id=frontend_id, reason=reason)
            self.driver.tell(FrontendDown(frontend_id))

    # ------------------------------------------------------------ commands

    def _perform(self, command: Command) -> None:
        match command:
            case Send(peer=peer, message=message):
                to = self._link if peer == MASTER else self._streams.get(FrontendId(peer))
                if to is not None:
                    to.send(message)
            case RunStep(rank=rank, plan=plan):
                self.stall.begun(rank, plan)
                self.runners[rank].submit(plan)
            case Pull():
                task = asyncio.get_running_loop().create_task(self._pull(command))
                self._pulls.add(task)
                task.add_done_callback(self._pulls.discard)
            case Note():
                self.on_note(command)
            case _:
                raise TypeError(f"not a command of a worker: {type(command).__name__}")

    async def _pull(self, pull: Pull) -> None:
        """Answers in time, whatever the transport does."""
        reason = ""
        try:
            if self.transport is None:
                raise TransferFailed("this worker has no transport")
            async with asyncio.timeout(pull.timeout_s):
                await self.transport.pull(pull.source, pull.start, pull.num_tokens, pull.pages)
        except TimeoutError:
            reason = f"{pull.source.worker_id} took longer than {pull.timeout_s:g} s"
        except TransferFailed as error:
            reason = str(error)
        except Exception as error:  # a transport's bug costs a transfer, not the worker
            reason = f"{type(error).__name__}: {error}"
        self.driver.tell(Pulled(pull.rank, pull.number, not reason, reason))

    def _stalled(self, hung: bool) -> None:
        self.driver.tell(Stalled(hung))

    def _fail(self, reason: str) -> None:
        self.failed = self.failed or reason
        self.on_fatal(reason)

    def _fault(self, error: Exception) -> None:
        """A scheduler that has failed once cannot be trusted with what it holds: better a new
        life, and its requests resumed elsewhere."""
        self.on_note(fault_note("worker", error))
        self._fail(f"scheduler failed: {type(error).__name__}: {error}")

    def _after_turn(self) -> None:
        if self.draining and self.core.drained:
            self.drained.set()

    def _note(self, event: str, **fields: object) -> None:
        self.on_note(Note(event, fields))

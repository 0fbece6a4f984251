"""A Runner in a process of its own, spoken to over a Unix socket pair.

The control process never loads the model's libraries; the child does nothing but build the Runner,
measure it, and execute steps. It ends with its parent, whichever way that ends: the kernel kills it
(PR_SET_PDEATHSIG), and its socket reads end of file. On any error of its own it leaves by os._exit,
because half-finished native threads have been seen to hang an orderly exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from struct import Struct
from typing import Any, Protocol

import msgspec

from rtp.core.card import ModelCard
from rtp.core.errors import RtpError
from rtp.core.ports import Capacity, Runner
from rtp.core.steps import StepPlan, StepResult
from rtp.io.hardware import hardware_class
from rtp.io.measure import BUDGET_S, LONGEST, measure

_LENGTH = Struct("<I")
_PR_SET_PDEATHSIG = 1


class RunnerSpec(msgspec.Struct, frozen=True):
    """What the child builds: the first frame it reads."""

    backend: str
    model: str
    """Name or path."""
    served_name: str
    """What clients call it; "": the name of the model, or of a backend that has none."""
    params: dict[str, Any]  # Any: each backend's own
    max_batch_tokens: int
    measure_s: float = BUDGET_S
    """Seconds of steps by which it is measured."""
    measure_tokens: int = LONGEST
    """Of the longest prompt among them."""


class Progress(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """A line for people while the child starts."""

    line: str


class Ready(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """The Runner is built and measured."""

    capacity: Capacity
    card: ModelCard
    profile: tuple[float, ...]
    hardware: str


class Done(msgspec.Struct, frozen=True, tag=3, array_like=True):
    result: StepResult


class Broken(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """The child gives up; it is the last frame."""

    reason: str


FromRunner = Progress | Ready | Done | Broken


class RunnerHandle(Protocol):
    """A rank's Runner as worker_loop sees it. RunnerProcess is the one; tests have a thread."""

    pid: int

    async def start(self, on_event: Callable[[FromRunner], None]) -> None:
        """Starts it; everything it says comes as events, Broken at most once and last."""
        ...

    def submit(self, plan: StepPlan) -> None: ...

    async def close(self) -> None: ...


NATIVE = {"GOMP_SPINCOUNT": "5000", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}
"""How the native libraries of a rank behave, where the environment does not say otherwise.

Threads spin at a barrier for a moment and then sleep: OpenMP's default takes the core for
milliseconds from whatever the others wait for. Beside one busy neighbour on two cores a decode step
took 150 to 430 ms, with this 80, sleeping at once 22; on quiet cores 14, 14 and 20 ms.
oneDNN keeps a kernel for every number of rows it has met, by default 1,024: 600 MB under mixed
traffic for no measurable speed.
"""


class RunnerProcess:
    """The parent's end. threads: size of the child's native thread pools."""

    def __init__(self, spec: RunnerSpec, *, threads: int) -> None:
        self.pid = 0
        self._spec = spec
        self._threads = threads
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self, on_event: Callable[[FromRunner], None]) -> None:
        ours, theirs = socket.socketpair()
        threads = str(self._threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rtp.rank"),
                *(str(theirs.fileno()), str(os.getpid())),
                pass_fds=(theirs.fileno(),),
                env=NATIVE | os.environ | dict.fromkeys(names, threads),
            )
        self.pid = self._process.pid
        loop = asyncio.get_running_loop()

        def on_end() -> None:
            self._ending = loop.create_task(self._tell_end(on_event))

        reader = _Reader(
            lambda event: None if self._closing else on_event(event),
            on_end,
        )
        self._transport, _ = await loop.create_connection(lambda: reader, sock=ours)
        self._transport.set_write_buffer_limits(high=64 << 20)
        self._write(msgspec.msgpack.encode(self._spec))

    def submit(self, plan: StepPlan) -> None:
        self._write(_encode(plan))

    async def _tell_end(self, on_event: Callable[[FromRunner], None]) -> None:
        """The child went without a word."""
        assert self._process is not None
        reason = "closed its socket"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                code = await self._process.wait()
                name = f" ({signal.Signals(-code).name})" if code < 0 else ""
                reason = f"ended with {code}{name}"
        if not self._closing:
            on_event(Broken(reason))

    async def close(self) -> None:
        """Ends the child, by force when it does not follow within a second."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()
        if self._process is None or self._process.returncode is not None:
            return
        try:
            async with asyncio.timeout(1.0):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def _write(self, body: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_LENGTH.pack(len(body)) + body)


_encode = msgspec.msgpack.Encoder().encode


class _Reader(asyncio.Protocol):
    """Frames of the child. on_end: it ended without a word."""

    def __init__(self, on_event: Callable[[FromRunner], None], on_end: Callable[[], None]) -> None:
        self._on_event = on_event
        self._on_end = on_end
        self._decode = msgspec.msgpack.Decoder(FromRunner).decode
        self._received = bytearray()
        self._broken = False

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start = 0
        while len(received) - start >= 4:
            stop = start + 4 + _LENGTH.unpack_from(received, start)[0]
            if stop > len(received):
                break
            event = self._decode(memoryview(received)[start + 4 : stop].tobytes())
            self._broken = self._broken or isinstance(event, Broken)
            self._on_event(event)
            start = stop
        del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._broken:
            self._on_end()


# ---------------------------------------------------------------- the child


Load = Callable[["RunnerSpec", Callable[[str], None]], tuple[Runner, ModelCard]]
"""Makes the Runner and its model's card, saying how it goes; joins rooms, so an entry point has
it."""


def serve(descriptor: int, parent: int, load: Load) -> None:
    """The life of the child: one Runner, until the parent closes the socket. Does not return."""
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_IGN
        )  # sent to a whole group, they are the parent's to act on
    pipe = _Pipe(socket.socket(fileno=descriptor))
    try:
        body = pipe.read()
        if body is not None:
            _serve(pipe, msgspec.msgpack.decode(body, type=RunnerSpec), load)
    except RtpError as error:
        pipe.write(Broken(str(error)))
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        pipe.write(Broken(f"{type(error).__name__}: {error}"))
    else:
        os._exit(0)
    os._exit(1)


def _serve(pipe: _Pipe, spec: RunnerSpec, load: Load) -> None:
    runner, ready = prepare(spec, load, lambda line: pipe.write(Progress(line)))
    pipe.write(ready)
    decode = msgspec.msgpack.Decoder(StepPlan).decode
    while (body := pipe.read()) is not None:
        pipe.write(Done(execute(runner, decode(body))))
    runner.close()


def prepare(spec: RunnerSpec, load: Load, progress: Callable[[str], None]) -> tuple[Runner, Ready]:
    """A measured Runner and what it tells its parent."""
    runner, card = load(spec, progress)
    profile = measure(
        runner,
        spec.max_batch_tokens,
        progress,
        budget_s=spec.measure_s,
        longest=spec.measure_tokens,
    )
    hardware = hardware_class(spec.backend, spec.params)
    return runner, Ready(runner.capacity, card, profile, hardware)


def execute(runner: Runner, plan: StepPlan) -> StepResult:
    """One step, no faster than it says it was: a simulated Runner computes its seconds."""
    start = time.perf_counter()
    result = runner.execute(plan)
    ahead = result.elapsed_s - (time.perf_counter() - start)
    if ahead > 0:
        time.sleep(ahead)
    return result


def die_with(parent: int) -> None:
    """Has the kernel kill this process when `parent` (a pid) is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)  # it went before the call above


class _Pipe:
    """Blocking frames over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")

    def read(self) -> bytes | None:
        """The next frame, or None at the end."""
        head = self._file.read(4)
        if len(head) < 4:
            return None
        size = _LENGTH.unpack(head)[0]
        body = self._file.read(size)
        return body if len(body) == size else None

    def write(self, message: FromRunner) -> None:
        body = _encode(message)
        self._sock.sendall(_LENGTH.pack(len(body)) + body)

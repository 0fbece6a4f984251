"""What the serving entry points share: a bound socket, an end by signals, the run between."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

import uvloop

from rtp.config import Process
from rtp.core.commands import Note
from rtp.core.errors import ConfigError, RtpError
from rtp.io import addresses, logs
from rtp.io.handshake import read_secret
from rtp.io.runner_process import die_with

C = TypeVar("C", bound=Process)


class Server(Protocol):
    """Built inside the running loop."""

    async def start(self) -> None: ...

    def settle(self) -> None: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...


def run(name: str, config: C, build: Callable[[C, bytes, Callable[[Note], None]], Server]) -> None:
    """Serves until a signal. build: from config, cluster secret and what gets every Note. Says what
    is wrong in one line, and exits with 1."""
    if config.parent:
        die_with(config.parent)
    logs.setup(config.log_level)
    try:
        uvloop.run(_serve(config, build))
    except RtpError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


async def _serve(config: C, build: Callable[[C, bytes, Callable[[Note], None]], Server]) -> None:
    secret = read_secret(config.secret_path, create=config.secret_file is None)
    server = build(config, secret, logs.note_logger())
    ended = asyncio.Event()
    until_signal(ended)
    try:
        await server.start()
        server.settle()
        await ended.wait()
        await server.drain()
    finally:
        await server.stop()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; nobody is answered before it is served. Raises ConfigError naming the
    port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        where = addresses.join(host, port)
        hint = " (another --port takes another one)" if error.errno == errno.EADDRINUSE else ""
        # The text that socket puts into such errors names the address once more.
        reason = (
            os.strerror(error.errno or 0)
            if not isinstance(error, socket.gaierror)
            else error.strerror
        )
        raise ConfigError(f"cannot listen on {where}: {reason}{hint}") from None


def until_signal(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT sets `stop`; a second SIGINT ends the process at once."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set()
        loop.add_signal_handler(signal.SIGINT, os._exit, 130)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, first)

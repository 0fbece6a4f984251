"""What the serving entry points share: a bound socket, and an end by signals."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket

from rtp.core.errors import ConfigError
from rtp.io import addresses


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

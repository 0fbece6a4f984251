"""Whether new work is admitted, and how open work is cut when the server must end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from rtp.io.errors_http import ApiError


class Gate:
    """close(): nothing new.  cut(): what is open ends now, with an error its client can read."""

    def __init__(self) -> None:
        self.closed = False
        self._open: set[asyncio.Task[object]] = set()
        self._cut: set[asyncio.Task[object]] = set()

    def close(self) -> None:
        self.closed = True

    def cut(self) -> None:
        self.closed = True
        for task in self._open:
            self._cut.add(task)
            task.cancel()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Around the work of the current task. Raises ApiError 503 once closed."""
        if self.closed:
            raise _ending()
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            yield
        finally:
            self._open.discard(task)
            self._cut.discard(task)

    def reason(self, error: BaseException) -> BaseException:
        """The error to tell of: a cut arrives as a cancellation, which is then taken back. Any
        other cancellation (the client left) and any other error is returned as it is."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task in self._cut:
            task.uncancel()
            self._cut.discard(task)
            return _ending()
        return error


GATE = web.AppKey("gate", Gate)
"""Of an application made by http_frontend: for the entry point, which drains."""


def _ending() -> ApiError:
    return ApiError(503, "The server is shutting down", code="service_unavailable")

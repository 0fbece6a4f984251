"""Log lines: structlog, JSON off a terminal, one place where Notes of the cores become lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import structlog

from rtp.core.commands import Note

QUIET = frozenset({"request.placed", "request.held", "view.resynced", "stream.opened"})
"""Notes of the normal course of things: debug."""
LOUD = frozenset(
    {
        *("step.hung", "core.failed", "runner.failed", "worker.lost", "worker.refused"),
        *("registration.refused", "registration.failed", "master.lost", "master.unreachable"),
        "policy.failed",
    }
)
"""Notes an operator should see: warning."""


def setup(level: str) -> None:
    """For the whole process, once: lines to stderr."""
    tty = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if tty else structlog.processors.JSONRenderer()
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr, format="%(message)s")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def note_logger(**bound: object) -> Callable[[Note], None]:
    """Writes Notes, with `bound` in every line."""
    log = structlog.get_logger().bind(**bound)
    debug: bool = log.is_enabled_for(logging.DEBUG)

    def write(note: Note) -> None:
        if note.event in QUIET:
            if debug:
                log.debug(note.event, **note.fields)
        elif note.event in LOUD:
            log.warning(note.event, **note.fields)
        else:
            log.info(note.event, **note.fields)

    return write

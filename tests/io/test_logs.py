"""How loud a note is."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from rtp.core.commands import Note
from rtp.io.logs import note_logger


@pytest.mark.parametrize(
    ("event", "level"),
    [
        ("request.placed", "debug"),
        ("worker.joined", "info"),
        ("worker.lost", "warning"),
        ("policy.failed", "warning"),
    ],
)
def test_an_operator_who_reads_warnings_learns_what_fails(event: str, level: str):
    with capture_logs() as lines:
        note_logger(term=1)(Note(event, {"reason": "why"}))
    assert lines == [{"event": event, "log_level": level, "term": 1, "reason": "why"}]

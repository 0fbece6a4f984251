"""Same load, seed and configuration: the same decisions, byte for byte, in any process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rtp.core import plugins
from tests.replay.decisions import NUM_REQUESTS, decision_log, digest

POLICIES = plugins.names("routing")


@pytest.mark.parametrize("routing", POLICIES)
def test_a_run_repeats_byte_for_byte(routing: str) -> None:
    log = decision_log(routing, 1)
    assert log.count(b"request.placed") >= NUM_REQUESTS
    assert decision_log(routing, 1) == log


def test_another_seed_is_another_run() -> None:
    assert decision_log("predicted_ttft", 1) != decision_log("predicted_ttft", 2)


@pytest.mark.parametrize(("routing", "seed"), [("predicted_ttft", 1), ("faults", 5)])
def test_string_hashing_of_a_process_changes_nothing(routing: str, seed: int) -> None:
    """An iteration over a set, or a builtin hash(), would show here."""
    digests = {digest(routing, seed)}
    for hash_seed in ("1", "4711"):
        run = subprocess.run(
            [sys.executable, "-m", "tests.replay.decisions", routing, str(seed)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        )
        digests.add(run.stdout.strip())
    assert len(digests) == 1

"""`python -m rtp.worker --profile FILE`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtp.config import WorkerConfig
from rtp.core.errors import ConfigError
from rtp.io import profiles
from rtp.io.runner_process import RunnerProcess
from rtp.profiling import LONGEST, thorough, write_profile
from rtp.worker import runner_spec

COST = {"a": 2e-4, "b": 2e-6, "c": 1e-9, "d": 1e-3, "e": 1e-4, "f": 1e-8}


async def measured(path: Path) -> list[str]:
    config = WorkerConfig(backend="sim", max_batch_tokens=4096, params=COST, kv_tokens=8192)
    spec = thorough(runner_spec(config))
    assert spec.measure_tokens == LONGEST
    lines: list[str] = []
    await write_profile(RunnerProcess(spec, threads=1), spec, path, 1, lines.append)
    return lines


async def test_a_simulated_rank_is_measured_into_what_it_was_made_of(tmp_path: Path):
    path = tmp_path / "mine.json"
    assert "measuring" in await measured(path)
    profile = profiles.read(str(path))
    assert profile.cost.coefficients == pytest.approx(tuple(COST.values()), rel=0.02)
    assert (profile.name, profile.kv_tokens) == ("mine", 8192)
    assert "backend sim" in profile.source


async def test_a_profile_that_cannot_be_written_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        await measured(tmp_path / "nowhere" / "p.json")

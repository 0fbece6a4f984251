"""A real rank, measured into a profile file: what `python -m rtp.worker --profile FILE` does."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec

from rtp.core.cost import Cost, Profile
from rtp.core.errors import ConfigError, RtpError
from rtp.io import profiles
from rtp.io.runner_process import Broken, FromRunner, Progress, Ready, RunnerHandle, RunnerSpec

BUDGET_S = 20.0
LONGEST = 2048
"""Seconds of steps, tokens of the longest prompt: prompts grow longer than at a start, where nobody
should wait."""


def thorough(spec: RunnerSpec) -> RunnerSpec:
    """The same Runner, measured longer."""
    return msgspec.structs.replace(spec, measure_s=BUDGET_S, measure_tokens=LONGEST)


async def write_profile(
    runner: RunnerHandle, spec: RunnerSpec, path: Path, threads: int, say: Callable[[str], None]
) -> Profile:
    """Measures one rank on an otherwise idle machine. Raises RtpError where it does not start,
    ConfigError where the file cannot be written."""
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    def on_event(event: FromRunner) -> None:
        if isinstance(event, Progress):
            say(event.line)
        elif isinstance(event, Ready) and not ready.done():
            ready.set_result(event)
        elif isinstance(event, Broken) and not ready.done():
            ready.set_exception(RtpError(event.reason))

    try:
        await runner.start(on_event)
        found = await ready
    finally:
        await runner.close()
    profile = Profile(
        name=path.stem,
        source=f"Measured by rtp.worker --profile: {found.card.model}, backend {spec.backend},"
        f" {threads} threads, {platform.machine()} {platform.system()}; prompts up to {LONGEST}"
        " tokens. The transfer of KV was not.",
        **asdict(Cost(*found.profile)),
        kv_tokens=found.capacity.num_blocks * found.capacity.block_size,
    )
    try:
        profiles.write(path, profile)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return profile

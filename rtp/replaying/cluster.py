"""Which simulated workers there are, and what happens to them: options of several commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field, model_validator

from rtp.backends import sim
from rtp.backends.transport import sim as sim_transport
from rtp.config import Positive, Settings, option
from rtp.core.cost import Cost
from rtp.core.ports import Runner
from rtp.core.replay_fleet import KINDS, Fleet, fault
from rtp.core.trace import TraceRow
from rtp.io import profiles

Count = Annotated[int, Field(ge=0)]
Rows = Annotated[int, Field(gt=0, le=1_000_000)]
Blocks = Annotated[int, Field(gt=0, le=100_000_000)]
DEFAULT_PROFILE = "llama2-70b-8xa100"


class ClusterOptions(Settings):
    """Which simulated workers there are."""

    workers: Count = option(
        8, "Workers that prefill and decode; 0 by default beside others.", "cluster", "N"
    )
    prefill_workers: Count = option(0, "Workers that only prefill.", "cluster", "N")
    decode_workers: Count = option(0, "Workers that only decode.", "cluster", "N")
    dp: Positive = option(1, "Ranks of each worker.", "cluster", "RANKS")
    lockstep: bool = option(False, "The ranks of a worker step together.", "cluster")
    profile: str = option(
        DEFAULT_PROFILE,
        f"What steps cost: a file, or one of {', '.join(profiles.names())}.",
        "cluster",
        "NAME",
    )
    kv_blocks: Blocks | None = option(
        None, "Blocks a rank's cache holds; default: no limit.", "cluster", "BLOCKS"
    )
    max_batch_tokens: Positive = option(8192, "Tokens one step may compute.", "cluster", "TOKENS")
    chunk_while_decoding: Positive = option(
        2048, "Prompt tokens of a step that decodes as well.", "cluster", "TOKENS"
    )
    max_rows: Rows = option(64, "Rows of one step.", "cluster")
    latency_s: Annotated[float, Field(ge=0, le=0.2)] = option(
        0.0002, "Of one message, 0.2 at most.", "cluster", "SECONDS"
    )
    transfer_tokens_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = option(
        None, "KV from rank to rank; default: the profile's.", "cluster", "TOKENS"
    )
    service_error: Annotated[float, Field(ge=0, lt=0.577)] = option(
        0.0,
        "Steps take more or less than the profile says: standard deviation, as a share.",
        "trouble",
        "SHARE",
    )
    fault: tuple[str, ...] = option(
        (),
        f"AT:WHAT:WHICH[:NUMBER], comma separated; WHAT is {', '.join(KINDS)}; WHICH a worker (w0,"
        " p0, d0), its rank (w0/1) or *; NUMBER how many times slower, or seconds late.",
        "trouble",
        "FAULT,...",
    )

    @model_validator(mode="before")
    @classmethod
    def _has_workers(cls, given: dict[str, Any]) -> dict[str, Any]:
        split = given.get("prefill_workers") or given.get("decode_workers")
        return {"workers": 0} | given if split else given

    def fleet(self, rows: Sequence[TraceRow], block_size: int) -> Fleet:
        """The cluster, its caches large enough for the longest of the rows. Raises ConfigError
        where it is none that can serve."""
        profile = profiles.read(self.profile)
        speed = self.transfer_tokens_per_s or profile.transfer_tokens_per_s
        fleet = Fleet(
            runner=runner(profile.cost, rows, block_size, self.kv_blocks, self.max_rows),
            profile=profile.cost.coefficients,
            workers=self.workers,
            prefill_workers=self.prefill_workers,
            decode_workers=self.decode_workers,
            ranks=self.dp,
            lockstep=self.lockstep,
            transport=sim_transport.build(latency_s=profile.transfer_latency_s, tokens_per_s=speed)
            if speed
            else None,
            max_batch_tokens=self.max_batch_tokens,
            chunk_while_decoding=self.chunk_while_decoding,
            max_rows=self.max_rows,
            latency_s=self.latency_s,
            service_error=self.service_error,
            faults=tuple(fault(text) for text in self.fault),
        )
        fleet.check()
        return fleet


def runner(
    cost: Cost, rows: Sequence[TraceRow], block_size: int, kv_blocks: int | None, max_rows: int
) -> Callable[[], Runner]:
    """Makes Runners of this cost for these rows. kv_blocks None: room for all there ever is."""
    longest = max((row.num_tokens + row.num_output for row in rows), default=1)
    everything = sum(-(-(row.num_tokens + row.num_output) // block_size) for row in rows)
    num_blocks = kv_blocks or everything + max_rows
    coefficients = asdict(cost)
    return lambda: sim.build(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=longest + 1,
        contents=False,
        **coefficients,
    )

"""`python -m rtp.replay convert`: a trace of one format as a file of another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rtp.config import Seconds, option
from rtp.io.traces import native, write_mooncake
from rtp.replaying.options import TraceOptions, spread_by


class Config(TraceOptions):
    """`python -m rtp.replay convert`: Writes a trace in rtp's own format or in Mooncake's."""

    out: Path | None = option(None, "File to write; gzipped if it ends in .gz.", "output", "FILE")
    to: Literal["rtp", "mooncake"] = option(
        "rtp",
        "rtp keeps everything; mooncake keeps times to the ms, lengths and blocks.",
        "output",
    )
    spread_seed: Annotated[int, Field(ge=0)] | None = option(
        None, "Spreads the rows of one instant, by this seed.", "output"
    )
    spread_s: Seconds | None = option(
        None, "Spreads them over so long; default: the trace's grid.", "output"
    )

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if self.out is None:
            raise ValueError("give --out FILE")
        if self.spread_s is not None and self.spread_seed is None:
            raise ValueError("--spread-s says nothing without --spread-seed")
        return self


def main(config: Config) -> int:
    assert config.out is not None
    trace = config.read()
    rows = trace.rows
    if config.spread_seed is not None:
        rows = spread_by(rows, config.spread_seed, config.spread_s)
    if config.to == "rtp":
        native.write(config.out, rows, trace.block_size)
    else:
        write_mooncake(config.out, rows, trace.block_size)
    print(f"{config.out}: {len(rows)} requests, blocks of {trace.block_size} tokens")
    return 0

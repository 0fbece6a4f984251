"""`python -m rtp.replay convert`: a trace of one format as a file of another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rtp.config import option
from rtp.core.arrivals import spread
from rtp.io.traces import native, write_mooncake
from rtp.replaying.describe import tell_bad
from rtp.replaying.options import TraceOptions


class Config(TraceOptions):
    """`python -m rtp.replay convert`: Writes a trace in rtp's own format or in Mooncake's."""

    out: Path | None = option(None, "File to write; gzipped if it ends in .gz.", "output", "FILE")
    to: Literal["rtp", "mooncake"] = option(
        "rtp",
        "rtp keeps everything; mooncake keeps times to the ms, lengths and blocks.",
        "output",
    )
    spread_seed: Annotated[int, Field(ge=0)] | None = option(
        None, "Spreads the rows of one instant over the trace's grid, by this seed.", "output"
    )

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if self.out is None:
            raise ValueError("give --out FILE")
        return self


def main(config: Config) -> int:
    assert config.out is not None
    trace = config.read()
    rows = trace.rows
    if config.spread_seed is not None:
        rows = spread(rows, config.spread_seed)
    if config.to == "rtp":
        native.write(config.out, rows, trace.block_size)
    else:
        write_mooncake(config.out, rows, trace.block_size)
    print(f"{config.out}: {len(rows)} requests, blocks of {trace.block_size} tokens")
    for line in tell_bad(trace):
        print(line, file=sys.stderr)
    return 0

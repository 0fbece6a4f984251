"""`python -m rtp.replay convert`: a trace of one format as a file of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rtp.config import Seconds, option
from rtp.core.trace import TraceRow
from rtp.io.traces import native, write_mooncake
from rtp.io.traces.mooncake import MOONCAKE_BLOCK
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


def _lost(rows: Sequence[TraceRow], block_size: int) -> Iterator[str]:
    """What Mooncake's form cannot say, a line each."""
    if block_size != MOONCAKE_BLOCK:
        yield f"  read it with --set reader.block_size={block_size}\n"
    for count, what in (
        (sum(row.after >= 0 for row in rows), "wait for another no longer"),
        (sum(row.session >= 0 for row in rows), "have no session any more"),
        (sum(bool(row.tenant) for row in rows), "have no tenant any more"),
    ):
        if count:
            yield f"  {count} rows {what}\n"


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
    if config.to == "mooncake":
        print("".join(_lost(rows, trace.block_size)), end="")
    return 0

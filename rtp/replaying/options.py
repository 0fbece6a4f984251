"""Options that several commands share: which trace, how it becomes load."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rtp.config import Positive, Settings, option
from rtp.core.arrivals import open_loop, part
from rtp.core.errors import ConfigError
from rtp.core.master.master import Master
from rtp.io import traces
from rtp.io.traces import FORMATS, Trace

NO_OPTIONS = frozenset({"term", "routing", "tenants", "prefix_map", "max_ranks"})
"""Of the Master's constructor: they are objects, or given otherwise."""


class TraceOptions(Settings):
    """Which rows are replayed."""

    trace: Path | None = option(None, "The trace, gzipped or not.", "trace", "FILE")
    format: str | None = option(
        None,
        f"Of the trace: {', '.join(FORMATS)}; default: found by looking at it.",
        "trace",
        "NAME",
    )
    reader: dict[str, Any] = option(
        {},
        "Options of the format (--set reader.x=y; `python -m rtp.replay formats` lists them).",
        "trace",
    )
    loop: Literal["closed", "open"] = option(
        "closed",
        "closed: a row that waits for another comes its think time after that one's end; open: all"
        " rows come at their own times.",
        "trace",
    )
    rows: Positive | None = option(None, "Only so many, the first ones.", "trace", "N")

    @model_validator(mode="after")
    def _has_a_trace(self) -> Self:
        if self.trace is None:
            raise ValueError("give --trace FILE")
        return self

    def read(self) -> Trace:
        """The trace, cut to the rows wanted. Raises OSError, ConfigError where none is left."""
        assert self.trace is not None
        trace = traces.read(self.trace, self.format, **self.reader)
        if not trace.rows:
            raise ConfigError(f"{self.trace}: no row is a request; {_told(trace)}")
        rows = part(trace.rows, 0, self.rows or len(trace.rows))
        return replace(trace, rows=open_loop(rows) if self.loop == "open" else rows)


def _told(trace: Trace) -> str:
    """What is wrong with a trace, in a few words."""
    first = "".join(f", line {bad.line}: {bad.reason}" for bad in trace.bad[:1])
    return f"{trace.num_blank} blank lines, {len(trace.bad)} bad ones{first}"


class RunOptions(Settings):
    """How rows become load, and how many runs go on at once."""

    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = option(
        1.0, "Arrivals come so many times as fast.", "load", "FACTOR"
    )
    decode: bool = option(True, "false ends each request with its first token.", "load")
    seed: Annotated[int, Field(ge=0)] = option(0, "Of everything that is drawn.", "load")
    jobs: Positive = option(os.cpu_count() or 1, "Runs at once, each on a core.", "run", "N")
    master: dict[str, Any] = option({}, "Options of the Master (--set master.x=y).", "run")

    @field_validator("master")
    @classmethod
    def _are_the_masters(cls, options: dict[str, Any]) -> dict[str, Any]:
        there_are = inspect.signature(Master).parameters.keys() - NO_OPTIONS
        for name in options:
            if name not in there_are:
                raise ValueError(
                    f"master.{name} is no setting; there are {', '.join(sorted(there_are))}"
                )
        return options

"""Options that several commands share: which trace, how it becomes load."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from rtp.config import Positive, Settings, option
from rtp.core.arrivals import grid_s, open_loop, part, spread
from rtp.core.errors import ConfigError
from rtp.core.master.master import Master
from rtp.core.trace import TraceRow
from rtp.io import traces
from rtp.io.traces import FORMATS, Trace

BAD_SHOWN = 10
LEAST_GRID_S = 0.1
"""Closer instants are times as they were, not rounded ones."""
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Policies = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
NO_OPTIONS = frozenset({"return", "term", "routing", "tenants", "prefix_map", "max_ranks"})
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
        return self.read_from(self.trace)

    def read_from(self, path: Path) -> Trace:
        """The same of any file. What is wrong with it is told on stderr."""
        trace = traces.read(path, self.format, **self.reader)
        if not trace.rows:
            raise ConfigError(f"{path}: no row is a request; {_told(trace)}")
        for line in tell_bad(trace):
            print(line, file=sys.stderr)
        rows = part(trace.rows, 0, self.rows or len(trace.rows))
        return replace(trace, rows=open_loop(rows) if self.loop == "open" else rows)


def tell_bad(trace: Trace) -> Iterator[str]:
    """Sentences on what is no row: counts by reason, and the first lines."""
    if trace.num_blank:
        yield f"{trace.name}: {trace.num_blank} blank lines"
    if trace.num_renamed:
        yield (
            f"{trace.name}: {trace.num_renamed} blocks renamed: one number stood behind different"
            " prefixes"
        )
    if trace.bad:
        yield f"{trace.name}: {len(trace.bad)} bad rows, not in the trace:"
    yield from (f"  line {bad.line}: {bad.reason}" for bad in trace.bad[:BAD_SHOWN])
    if len(trace.bad) > BAD_SHOWN:
        kinds = Counter(re.sub(r"[\d.]+", "N", bad.reason) for bad in trace.bad)
        yield f"  and {len(trace.bad) - BAD_SHOWN} more; in all:"
        yield from (f"  {count} x {kind}" for kind, count in kinds.most_common())


def spread_by(rows: Sequence[TraceRow], seed: int, within_s: float | None) -> list[TraceRow]:
    """Rows of one instant spread over so long, or over the trace's grid where None. Raises
    ConfigError where there is no grid, so that all seeds would be alike."""
    if within_s is None and grid_s(rows) < LEAST_GRID_S:
        raise ConfigError("the rows lie on no grid, so seeds change nothing; give --spread-s")
    return spread(rows, seed, within_s)


def _told(trace: Trace) -> str:
    """What is wrong with a trace, in a few words."""
    first = "".join(f", line {bad.line}: {bad.reason}" for bad in trace.bad[:1])
    return f"{trace.num_blank} blank lines, {len(trace.bad)} bad ones{first}"


class RunOptions(Settings):
    """How rows become load, and how many runs go on at once."""

    speed: Speed = option(1.0, "Arrivals come so many times as fast.", "load", "FACTOR")
    decode: bool = option(True, "false ends each request with its first token.", "load")
    seed: Annotated[int, Field(ge=0)] = option(0, "Of everything that is drawn.", "load")
    jobs: Positive = option(os.cpu_count() or 1, "Runs at once, each on a core.", "run", "N")
    master: dict[str, Any] = option({}, "Options of the Master (--set master.x=y).", "run")

    @field_validator("out", check_fields=False)
    @classmethod
    def _can_be_written(cls, out: Path | None) -> Path | None:
        """Before the runs, not behind them."""
        if out is not None and (not out.name or out.is_dir() or not out.parent.is_dir()):
            raise ValueError(f"{out} is no file in a folder that there is")
        return out

    @field_validator("master")
    @classmethod
    def _are_the_masters(cls, options: dict[str, Any]) -> dict[str, Any]:
        types = get_type_hints(Master.__init__)
        there_are = types.keys() - NO_OPTIONS
        checked = {}
        for name, value in options.items():
            if name not in there_are:
                raise ValueError(
                    f"master.{name} is no setting; there are {', '.join(sorted(there_are))}"
                )
            try:
                checked[name] = TypeAdapter(types[name]).validate_python(value)
            except ValidationError as error:
                raise ValueError(f"master.{name}: {error.errors()[0]['msg']}") from None
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"master.{name} is from 0 up, not {value}")
        return checked

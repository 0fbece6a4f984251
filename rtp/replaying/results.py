"""What a comparison found, as one JSON: the same bytes for the same trace, options and seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

import rtp
from rtp.config import Settings
from rtp.core.confidence import Difference, difference
from rtp.core.run_series import Series
from rtp.core.run_stats import Quantiles, Slo, Stats
from rtp.io.traces import Trace
from rtp.replaying.cluster import ClusterOptions
from rtp.replaying.options import tell_bad
from rtp.replaying.repeat import command

FIGURES = {
    "ttft_s.p50": "lower",
    "ttft_s.p95": "lower",
    "ttft_s.p99": "lower",
    "tpot_s.p95": "lower",
    "e2e_s.p95": "lower",
    "slo_share": "higher",
    "goodput": "higher",
    "hit_ratio": "higher",
}
"""Compared between policies, and which way is better."""


ALWAYS_TOLD = frozenset({"workers", "profile"})
"""Of a cluster."""
TITLES = ("policy", "TTFT p50", "p95", "p99", "max", "TPOT p95", "SLO", "hit", "failed", "req/s")


class Seeded(msgspec.Struct, frozen=True):
    """A policy's figures under one arrival seed."""

    seed: int
    stats: Stats


class PolicyResult(msgspec.Struct, frozen=True):
    """One policy. Curves are those of the first seed."""

    name: str
    routing: str
    early: bool
    params: dict[str, Any]  # Any: what JSON holds
    runs: list[Seeded]
    series: Series
    differences: dict[str, Difference]
    """By figure, from the first policy; none of the first one itself."""


class TraceFacts(msgspec.Struct, frozen=True):
    """Of the rows that were replayed."""

    name: str
    format: str
    rows: int
    bad: int
    blank: int
    block_size: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    left_out: list[str]
    """What of the file is no row, and why, in sentences."""


class Result(msgspec.Struct, frozen=True):
    """Everything: what the JSON file holds and the page shows."""

    version: str
    command: str
    """Repeats it."""
    trace: TraceFacts
    where: dict[str, Any]  # Any: what JSON holds
    """The cluster: of simulated workers, or an address."""
    load: dict[str, Any]  # Any: what JSON holds
    slo: str
    policies: list[PolicyResult]
    better: dict[str, str]
    """By figure: "lower" or "higher"."""


def compare(policies: Sequence[PolicyResult]) -> list[PolicyResult]:
    """The same, each with its differences from the first."""
    first, *others = policies
    return [first, *(msgspec.structs.replace(p, differences=_from(first, p)) for p in others)]


def _from(first: PolicyResult, other: PolicyResult) -> dict[str, Difference]:
    found = {}
    for name in FIGURES:
        base, theirs = ([_figure(run.stats, name) for run in p.runs] for p in (first, other))
        pairs = [
            (b, t) for b, t in zip(base, theirs, strict=True) if b is not None and t is not None
        ]
        if pairs:
            found[name] = difference([b for b, _ in pairs], [t for _, t in pairs])
    return found


def _figure(stats: Stats, name: str) -> float | None:
    value: Any = stats  # Any: a figure or a group of figures
    for part in name.split("."):
        value = getattr(value, part)
    assert value is None or isinstance(value, float)
    return value


def facts(name: str, config: Settings, trace: Trace) -> dict[str, Any]:  # Any: what JSON holds
    """What stands before a command's own findings in its JSON."""
    return {
        "version": rtp.__version__,
        "command": command(name, config),
        "trace": trace_facts(trace),
        "where": cluster(config),
    }


def trace_facts(trace: Trace) -> TraceFacts:
    rows = trace.rows
    return TraceFacts(
        name=trace.name,
        format=trace.format,
        rows=len(rows),
        bad=len(trace.bad),
        blank=trace.num_blank,
        block_size=trace.block_size,
        seconds=max((row.arrival_s for row in rows), default=0.0),
        prompt_tokens=sum(row.num_tokens for row in rows),
        output_tokens=sum(row.num_output for row in rows),
        left_out=list(tell_bad(trace)),
    )


def cluster(config: Settings) -> dict[str, Any]:  # Any: what JSON holds
    """The options that were given, and those that always matter."""
    fields = ClusterOptions.model_fields
    given = {name: getattr(config, name) for name in fields}
    return {
        name: value
        for name, value in given.items()
        if name in ALWAYS_TOLD or value != fields[name].get_default()
    }


def describe_slo(slo: Slo) -> str:
    """In words."""
    words = f"first token within {slo.ttft_s:g} s"
    if slo.factor:
        words += f" + {slo.factor:g} x its own uncached prefill"
    if slo.tpot_s is not None:
        words += f", the others within {1000 * slo.tpot_s:g} ms each"
    return words


def to_json(result: Result | dict[str, Any]) -> bytes:  # Any: what JSON holds
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"


def make(**parts: Any) -> Result:  # Any: Result's own fields
    return Result(version=rtp.__version__, better=FIGURES, **parts)


def table(result: Result) -> str:
    """For a terminal: a line per policy, over all seeds where there are several."""
    rows: list[tuple[str, ...]] = [TITLES]
    for policy in result.policies:
        all_stats = [run.stats for run in policy.runs]
        ttft = [stats.ttft_s for stats in all_stats]
        rows.append(
            (
                policy.name,
                *(_seconds(ttft, name) for name in ("p50", "p95", "p99")),
                _seconds(ttft, "max", max),
                _seconds([stats.tpot_s for stats in all_stats], "p95"),
                f"{100 * _mean([s.slo_share for s in all_stats]):.1f} %",
                f"{100 * _mean([s.hit_ratio for s in all_stats]):.1f} %",
                str(sum(s.failed for s in all_stats)),
                f"{_mean([s.requests_per_s for s in all_stats]):.2f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    seeds = len(result.policies[0].runs)
    if seeds > 1:
        lines.append(f"Means over {seeds} seeds; max and failed are of all of them.")
    for policy in result.policies:
        reasons: Counter[str] = Counter()
        for run in policy.runs:
            reasons.update(run.stats.failures)
        lines += [f"{policy.name}: {count} x {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _seconds(
    groups: Sequence[Quantiles], name: str, over: Callable[[Sequence[float]], float] = _mean
) -> str:
    values = [value for group in groups if (value := getattr(group, name)) is not None]
    if not values:
        return "-"
    one = over(values)
    return f"{one:.2f} s" if one >= 1 else f"{1000 * one:.1f} ms"

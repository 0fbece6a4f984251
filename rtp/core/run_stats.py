"""The figures of one replay: percentiles, goals met, work per rank, where the time went, failures.

Percentiles are of the requests that came so far; how many did not stands beside them, and shares
and rates count every request, so a run that fails half of them does not look twice as good.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from rtp.core.replayed import Replayed
from rtp.core.types import FloatArray

PERCENTS = (50.0, 90.0, 95.0, 99.0, 99.9)


class Quantiles(msgspec.Struct, frozen=True):
    """Of a number of values; nan-free, None where there is no value."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p999: float | None = None
    max: float | None = None


def quantiles(values: FloatArray) -> Quantiles:
    """Interpolated between neighbours; NaN is no value."""
    there = values[~np.isnan(values)]
    if not len(there):
        return Quantiles(0)
    p50, p90, p95, p99, p999 = (float(point) for point in np.percentile(there, PERCENTS))
    mean, most = float(there.mean()), float(there.max())
    return Quantiles(len(there), mean, p50, p90, p95, p99, p999, most)


@dataclass(frozen=True, slots=True)
class Slo:
    """A goal for each request: the first token within `ttft_s + factor * alone`, where alone is
    its prefill without a cache or another request, and the others within `tpot_s` each on
    average."""

    ttft_s: float = 1.0
    factor: float = 2.0
    tpot_s: float | None = None

    def met(self, run: Replayed, alone_s: FloatArray) -> npt.NDArray[np.bool_]:
        """Of each row; one that failed has not met it. alone_s: [rows]."""
        met = run.ok & (run.ttft_s <= self.ttft_s + self.factor * alone_s)
        if self.tpot_s is not None:
            met &= ~(run.tpot_s > self.tpot_s)
        return np.asarray(met, dtype=np.bool_)


class Phases(msgspec.Struct, frozen=True):
    """Where the requests that ended spent their time: seconds each, on average."""

    queue_s: float
    """In the Master, until the grant."""
    rank_s: float
    """At the rank, beside its own prefill: behind others, in chunks between decode steps, on the
    way."""
    prefill_s: float
    """Its own prefill, as the cost model has it for an idle rank."""
    decode_s: float
    """From the first token to the end."""


class Stats(msgspec.Struct, frozen=True):
    """One run, in numbers. Shares are of all requests, 0 to 1; rates are per second of the time
    from the first arrival to the last end."""

    requests: int
    ended: int
    failed: int
    failures: dict[str, int]
    """Count by reason."""
    seconds: float
    ttft_s: Quantiles
    tpot_s: Quantiles
    e2e_s: Quantiles
    slo_share: float
    """Requests within the goal."""
    goodput: float
    """Requests within the goal, a second."""
    requests_per_s: float
    """Ended ones."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    hit_ratio: float
    """Share of prompt tokens found in a cache."""
    hits: dict[str, float]
    """The same by tier."""
    imbalance: float | None
    """Prompt tokens computed for first tokens by the busiest rank over the mean of those that
    prefill; None where ranks are not known."""
    retried: int | None
    """Requests with more than one grant; None, as all that follows, where grants are not seen."""
    held: int | None
    """Times a request was held for a busy rank that had its prefix."""
    fallbacks: int | None
    """Decisions in which the policy failed and the Master's own rule took its place."""
    phases: Phases | None
    """None also where no request came so far."""
    queue_max: int | None
    """Most requests that waited in the Master at once."""
    queue_mean: float | None


def stats(run: Replayed, slo: Slo, alone_s: FloatArray, own_s: FloatArray, num_ranks: int) -> Stats:
    """alone_s, own_s: [rows], seconds of each prompt's prefill on an idle rank, without its cached
    tokens and with them; 0 where there is no cost model.  num_ranks: 0 where they are not known."""
    met = slo.met(run, alone_s)
    count, ended = len(run.ok), int(run.ok.sum())
    seconds = max(run.end_s, 1e-9)
    prompt = max(1, int(run.prompt_tokens.sum()))
    e2e_s = np.where(run.ok, run.ended_s - run.arrival_s, np.nan)
    return Stats(
        requests=count,
        ended=ended,
        failed=count - ended,
        failures=dict(Counter(sorted(str(reason) for reason in run.failed if reason))),
        seconds=run.end_s,
        ttft_s=quantiles(run.ttft_s),
        tpot_s=quantiles(run.tpot_s),
        e2e_s=quantiles(e2e_s),
        slo_share=float(met.sum()) / max(1, count),
        goodput=float(met.sum()) / seconds,
        requests_per_s=ended / seconds,
        prompt_tokens_per_s=float(run.prompt_tokens[run.ok].sum()) / seconds,
        output_tokens_per_s=float(run.output_tokens.sum()) / seconds,
        hit_ratio=run.hit_ratio,
        hits={"device": float(run.cached_tokens.sum()) / prompt},
        imbalance=run.imbalance(num_ranks) if num_ranks and (run.ranks >= 0).any() else None,
        retried=int((run.attempts > 1).sum()) if run.grants_seen else None,
        held=run.num_holds if run.grants_seen else None,
        fallbacks=run.num_fallbacks if run.grants_seen else None,
        phases=_phases(run, own_s) if run.grants_seen else None,
        queue_max=_most_waiting(run) if run.grants_seen else None,
        queue_mean=_waited_s(run) / seconds if run.grants_seen else None,
    )


def _phases(run: Replayed, own_s: FloatArray) -> Phases | None:
    told = run.ok & ~np.isnan(run.granted_s) & ~np.isnan(run.first_s)
    if not told.any():
        return None
    at_rank = (run.first_s - run.granted_s)[told]
    own = np.minimum(own_s[told], at_rank)
    return Phases(
        queue_s=float(run.waited_s[told].mean()),
        rank_s=float((at_rank - own).mean()),
        prefill_s=float(own.mean()),
        decode_s=float((run.ended_s - run.first_s)[told].mean()),
    )


def _most_waiting(run: Replayed) -> int:
    """Whoever leaves at an instant leaves before others come; a pause of nothing is no wait."""
    left = np.where(np.isnan(run.granted_s), run.ended_s, run.granted_s)
    times = np.concatenate([left, run.arrival_s])
    change = np.concatenate([-np.ones(len(left)), np.ones(len(left))])
    waits = np.concatenate([left, left]) > np.concatenate([run.arrival_s, run.arrival_s])
    times, change = times[waits], change[waits]
    order = np.lexsort((change, times))
    return int(np.cumsum(change[order]).max(initial=0.0))


def _waited_s(run: Replayed) -> float:
    left = np.where(np.isnan(run.granted_s), run.ended_s, run.granted_s)
    return float((left - run.arrival_s).sum())

"""What the Master knows and how well: its views of caches, its predictions, its policy, tenants.

All are read from the overview when scraped. Labels are workers that are there, and tenants that the
settings name; a tenant without a name in them is one of `other`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Overview = dict[str, Any]  # Any: JSON for people; its members are listed in io/dashboard
Path = tuple[str, ...]

GAUGES: dict[Path, tuple[str, str]] = {
    ("status_period_s",): (
        "rtp_status_period_seconds",
        "How often each worker is asked to report; longer while the Master's loop is too busy",
    ),
    ("prefix_map", "arriving"): (
        "rtp_arriving_blocks",
        "Blocks that granted requests bring to their ranks, until these are settled",
    ),
    ("frontends",): (
        "rtp_frontends",
        "Who may ask: frontends here and apart, and POST /v1/schedule",
    ),
    ("queue", "early"): (
        "rtp_early_requests",
        "Requests that wait for a first worker of their model, soon after the Master's start",
    ),
    ("tenants", "accounts"): ("rtp_tenant_accounts", "Tenants with an account"),
}
COUNTERS: dict[Path, tuple[str, str]] = {
    ("stale_messages",): (
        "rtp_stale_messages",
        "Messages of an old epoch, term or sequence, or of nobody, that were ignored",
    ),
    ("cache", "predicted_hit_tokens"): (
        "rtp_predicted_hit_tokens",
        "Prompt tokens that the Master expected in a rank's cache",
    ),
    ("cache", "hit_tokens"): (
        "rtp_confirmed_hit_tokens",
        "Prompt tokens that the rank found in its cache, of the same requests",
    ),
    ("cache", "missed_predictions"): (
        "rtp_missed_predictions",
        "Requests with expected hits of which the rank found none: hashes may disagree",
    ),
    ("requests", "granted"): ("rtp_grants", "Grants"),
    ("requests", "split"): ("rtp_split_grants", "Grants that name a decode rank as well"),
    ("requests", "handovers"): (
        "rtp_handovers",
        "Split requests that went on at their decode rank",
    ),
    ("requests", "held_back"): (
        "rtp_held_back",
        "Looks and rounds that left requests waiting, for want of headroom on any decode rank",
    ),
    ("groups", "rounds"): (
        "rtp_group_rounds",
        "Times that several requests were granted together to ranks that step together",
    ),
    ("groups", "grants"): ("rtp_group_grants", "Grants of those rounds"),
    ("policy", "looks"): ("rtp_policy_looks", "Requests the routing policy was asked about"),
    ("policy", "fallbacks"): (
        "rtp_policy_fallbacks",
        "Decisions by least wait because the routing policy failed",
    ),
}
VIEW_COUNTERS = {
    "resyncs": ("rtp_view_resyncs", "Snapshots that rebuilt the view of a worker's cache"),
    "gaps": ("rtp_view_gaps", "Deltas or slices that did not fit the view"),
    "late": ("rtp_view_late_messages", "Messages of an earlier life of the worker, ignored"),
}
GROUP_COUNTERS = {
    "steps": ("rtp_group_steps", "Steps of ranks that step together, one for all"),
    "dummy_steps": ("rtp_group_dummy_steps", "Steps of ranks without work, for the others"),
    "step_s": (
        "rtp_group_step_seconds",
        "Step time of those ranks, up to the slowest of each step",
    ),
    "wait_s": ("rtp_group_wait_seconds", "The part of it spent waiting for the slowest"),
}
SOURCES = ("none", "snapshot", "delta")
TENANT_COUNTERS = {
    "admitted": ("rtp_tenant_requests", "Requests that passed the gates"),
    "refused": ("rtp_tenant_refusals", "Requests refused by a limit"),
    "used_tokens": ("rtp_tenant_tokens", "Tokens computed: uncached prompt and output"),
}
OTHER = "other"


def master_facts(overview: Overview) -> Iterator[Metric]:
    """Everything of the overview that is not a rank's load. What it lacks is left out."""
    yield from _scalars(GaugeMetricFamily, GAUGES, overview)
    yield from _scalars(CounterMetricFamily, COUNTERS, overview)
    workers = [w for w in overview.get("workers", ()) if "view" in w]
    yield from _views(workers)
    yield from _predictors(workers)
    yield from _groups(workers)
    if "tenants" in overview:
        yield from _tenants(overview["tenants"])


def _scalars(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    known: dict[Path, tuple[str, str]],
    overview: Overview,
) -> Iterator[Metric]:
    for path, (name, text) in known.items():
        found: Any = overview
        for key in path:
            found = found.get(key, {})
        if not isinstance(found, dict):
            yield kind(name, text, value=found)


def _views(workers: Iterable[Overview]) -> Iterator[Metric]:
    age = GaugeMetricFamily(
        "rtp_view_age_seconds", "Since a worker's cache was last heard of", labels=("worker",)
    )
    source = GaugeMetricFamily(
        "rtp_view_source",
        "1 for what the view of a worker's cache was last made of",
        labels=("worker", "source"),
    )
    counters = {
        key: CounterMetricFamily(name, text, labels=("worker",))
        for key, (name, text) in VIEW_COUNTERS.items()
    }
    for worker in workers:
        worker_id, view = worker["worker_id"], worker["view"]
        if view["age_s"] is not None:
            age.add_metric((worker_id,), view["age_s"])
        for name in SOURCES:
            source.add_metric((worker_id, name), float(view["source"] == name))
        for key, counter in counters.items():
            counter.add_metric((worker_id,), view[key])
    yield from (age, source, *counters.values())


def _predictors(workers: Iterable[Overview]) -> Iterator[Metric]:
    error = GaugeMetricFamily(
        "rtp_predictor_error_ratio",
        "Moving mean of |actual - predicted| / actual of what a worker's kind computes",
        labels=("worker", "phase"),
    )
    samples = CounterMetricFamily(
        "rtp_predictor_samples", "Measurements it learned from", labels=("worker", "phase")
    )
    for worker in workers:
        predictor = worker["predictor"]
        for phase in ("prefill", "decode"):
            labels = (worker["worker_id"], phase)
            error.add_metric(labels, predictor[f"{phase}_error"])
            samples.add_metric(labels, predictor[f"{phase}_samples"])
    yield from (error, samples)


def _groups(workers: Iterable[Overview]) -> Iterator[Metric]:
    for key, (name, text) in GROUP_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=("worker",))
        for worker in workers:
            if worker["group"] is not None:
                counter.add_metric((worker["worker_id"],), worker["group"][key])
        yield counter


def _tenants(tenants: Overview) -> Iterator[Metric]:
    rows = {**tenants["named"], OTHER: tenants["others"]}
    for key, (name, text) in TENANT_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=("tenant",))
        for tenant, usage in rows.items():
            counter.add_metric((tenant,), usage[key])
        yield counter
    waiting = GaugeMetricFamily(
        "rtp_tenant_requests_waiting", "Requests waiting for a rank", labels=("tenant",)
    )
    for tenant, usage in tenants["named"].items():
        waiting.add_metric((tenant,), usage["waiting"])
    yield waiting

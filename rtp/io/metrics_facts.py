"""Facts read only when scraped: workers, the loop; and other names for what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from rtp.io.clock import LoopTimes
from rtp.io.metrics_master import Overview, master_facts

ALIASES = {
    "rtp_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "rtp_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "rtp_request_seconds": "vllm:e2e_request_latency_seconds",
    "rtp_prompt_tokens": "vllm:prompt_tokens",
    "rtp_generation_tokens": "vllm:generation_tokens",
    "rtp_prefix_query_tokens": "vllm:prefix_cache_queries",
    "rtp_prefix_hit_tokens": "vllm:prefix_cache_hits",
    "rtp_request_success": "vllm:request_success",
    "rtp_requests_running": "vllm:num_requests_running",
    "rtp_requests_waiting": "vllm:num_requests_waiting",
    "rtp_kv_usage_ratio": "vllm:kv_cache_usage_perc",
}
"""Names that dashboards and routers made for vLLM look for."""


class Facts(Collector):
    """Gauges of what exists now."""

    def __init__(self) -> None:
        self.overview: Callable[[], Overview] | None = None
        self.loop: LoopTimes | None = None
        self.master: Callable[[], bool] | None = None

    def collect(self) -> Iterator[Metric]:
        if self.overview is not None:
            yield from _cluster(self.overview())
        if self.loop is not None:
            yield from _loop(self.loop)
        if self.master is not None:
            text = "Whether the Master can be reached"
            yield GaugeMetricFamily("rtp_master_connected", text, value=self.master())


class WithAliases(Collector):
    """Everything in a registry, and the samples of ALIASES once more under their other names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            # Creation times double the series and nobody reads them.
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family
            alias = ALIASES.get(family.name)
            if alias is not None:
                copy = Metric(alias, family.documentation, family.type, family.unit)
                for s in family.samples:
                    copy.add_sample(alias + s.name.removeprefix(family.name), s.labels, s.value)
                yield copy


RANK_GAUGES = {
    "running": ("rtp_requests_running", "Requests with pages"),
    "waiting": ("rtp_requests_waiting", "Requests accepted by the worker, without pages"),
    "prefill_tokens": ("rtp_prefill_tokens_pending", "Prompt tokens still to compute"),
    "kv_free": ("rtp_kv_free_tokens", "Free or reclaimable tokens of the device tier"),
    "kv_total": ("rtp_kv_total_tokens", "Tokens of the device tier"),
    "reserved_tokens": (
        "rtp_reserved_tokens",
        "Output expected of granted requests, and prompts on their way to a decode rank",
    ),
    "headroom": ("rtp_headroom_tokens", "Free tokens that nobody is expected to need"),
}


TABLES = {
    ("queue", "requests"): ("rtp_queue_requests", "Requests waiting in the Master for a rank"),
    ("queue", "tokens"): ("rtp_queue_tokens", "Prompt tokens of those requests"),
    ("prefix_map", "blocks"): ("rtp_prefix_map_blocks", "Blocks the Master knows an owner of"),
    ("bookings",): ("rtp_bookings", "Requests charged to a rank"),
    ("affinity_chats",): ("rtp_affinity_chats", "Chats that have a preferred worker"),
}
"""Sizes of the Master's bounded tables, by their place in the overview."""


def _cluster(overview: Overview) -> Iterator[Metric]:
    yield from _ranks(overview.get("workers", ()))
    for path, (name, text) in TABLES.items():
        found: Any = overview
        for key in path:
            found = found.get(key, {})
        if not isinstance(found, dict):
            yield GaugeMetricFamily(name, text, value=found)
    gates = CounterMetricFamily(
        "rtp_gate_refusals", "Requests refused by an admission gate", labels=("gate",)
    )
    for gate, count in overview.get("refused", {}).items():
        gates.add_metric((gate,), count)
    yield gates
    yield from master_facts(overview)


def _ranks(workers: Sequence[Overview]) -> Iterator[Metric]:
    """A family at a time, the cheap one first: a scrape pauses between them."""
    states = GaugeMetricFamily("rtp_workers", "Workers, by state", labels=("state",))
    for state, count in sorted(Counter(worker["state"] for worker in workers).items()):
        states.add_metric((state,), count)
    yield states
    ranks = [
        ((worker["worker_id"], str(rank["rank"]), worker["model"]), rank)
        for worker in workers
        for rank in worker["ranks"]
    ]
    names = ("worker", "rank", "model_name")
    for column, (name, text) in RANK_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=names)
        for labels, rank in ranks:
            if column in rank:
                gauge.add_metric(labels, rank[column])
        yield gauge
    usage = GaugeMetricFamily("rtp_kv_usage_ratio", "Share of KV in use, 0 to 1", labels=names)
    for labels, rank in ranks:
        used = rank["kv_total"] - rank["kv_free"]
        usage.add_metric(labels, used / rank["kv_total"] if rank["kv_total"] else 0.0)
    yield usage


LOOP_COUNTERS = {
    "turns": ("rtp_loop_turns", "Turns of the event loop in which the scheduling core decided"),
    "cpu_s": ("rtp_loop_turn_cpu_seconds", "The loop's own CPU in those turns"),
    "samples": ("rtp_loop_samples", "Samples behind rtp_loop_late_seconds"),
    "late_s": ("rtp_loop_late_seconds", "Sum of timer lateness of the event loop"),
    "collections": ("rtp_loop_collections", "Garbage collections, made on purpose"),
    "collect_s": ("rtp_loop_collect_seconds", "Time they took"),
}
LOOP_GAUGES = {
    "busy": ("rtp_loop_busy_ratio", "Share of a core the event loop used lately, 0 to 1"),
    "max_turn_cpu_s": ("rtp_loop_turn_cpu_max_seconds", "Most own CPU of a turn so far"),
    "max_late_s": ("rtp_loop_late_max_seconds", "Worst timer lateness so far"),
    "max_collect_s": ("rtp_loop_collect_max_seconds", "Longest collection so far"),
}


def _loop(times: LoopTimes) -> Iterator[Metric]:
    for field, (name, text) in LOOP_COUNTERS.items():
        yield CounterMetricFamily(name, text, value=getattr(times, field))
    for field, (name, text) in LOOP_GAUGES.items():
        yield GaugeMetricFamily(name, text, value=getattr(times, field))

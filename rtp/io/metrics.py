"""Facts -> counters and histograms, in a registry of their own, as Prometheus text.

Labels come from bounded sets only: served models, our own routes, statuses, outcomes and codes.
Session ids and free text never become one (cases B01, B04), of tenants only names of the settings.
What belongs to a worker is read from the overview when scraped, so a worker that is gone leaves no
series behind (B03).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rtp.io.clock import LoopTimes
from rtp.io.metrics_facts import Facts, WithAliases
from rtp.io.metrics_master import Overview
from rtp.io.recent import Recent
from rtp.io.tally import Tally

CODES = frozenset(
    {
        "context_length_exceeded",
        "invalid_json",
        "model_not_found",
        "unsupported_parameter",
        "invalid_api_key",
        "rate_limit_exceeded",
        "service_unavailable",
        "overloaded",
        "timeout",
        "body_too_large",
        "slow_reader",
        "numeric_fault",
        "internal_error",
    }
)
SLICE = 200
"""Series written at one time."""
MAX_EVENTS = 256
"""Names of notes counted apart; they come from our own code, the bound is a safeguard."""

TTFT_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
GAP_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800)


class ModelMetrics:
    """The series of one served model, bound once so that a token costs no lookup."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.ttft = metrics.ttft.labels(model)
        self.gap = metrics.gap.labels(model)
        self.seconds = metrics.seconds.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.generation_tokens = metrics.generation_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.queried_tokens = metrics.queried_tokens.labels(model)
        self.recent = metrics.recent
        self._success = metrics.success
        self._model = model

    def first_token(self, seconds: float) -> None:
        """Arrival to the first token of a request."""
        self.ttft.observe(seconds)
        self.recent.ttft(seconds)

    def next_tokens(self, gap_s: float, tokens: int) -> None:
        """`tokens` of one choice arrived together, `gap_s` after the ones before."""
        self.gap.observe(gap_s / max(tokens, 1))
        self.recent.gap(gap_s / max(tokens, 1))

    def tokens(self, generated: int) -> None:
        self.generation_tokens.inc(generated)
        self.recent.tokens(generated)

    def prompt(self, num_tokens: int, cached_tokens: int) -> None:
        """A prompt was processed; so many of its tokens were found in a cache."""
        self.prompt_tokens.inc(num_tokens)
        self.queried_tokens.inc(num_tokens)
        self.cached_tokens.inc(cached_tokens)
        self.recent.prompt(num_tokens, cached_tokens)

    def finished(self, reasons: Iterable[str], seconds: float) -> None:
        """A request was answered in full; one reason per choice."""
        self.seconds.observe(seconds)
        for reason in reasons:
            self._success.labels(self._model, reason).inc()


class Metrics:
    """All counters of one process. Not thread-safe; scraping runs on the loop as well."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self.recent = Recent(clock)
        self.ttft = self._histogram(
            "rtp_time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS
        )
        self.gap = self._histogram("rtp_inter_token_seconds", "Gap between tokens", GAP_BUCKETS)
        self.seconds = self._histogram("rtp_request_seconds", "Arrival to last token", E2E_BUCKETS)
        self.prompt_tokens = self._counter(
            "rtp_prompt_tokens", "Prompt tokens processed", "model_name"
        )
        self.generation_tokens = self._counter(
            "rtp_generation_tokens", "Tokens delivered", "model_name"
        )
        self.queried_tokens = self._counter(
            "rtp_prefix_query_tokens", "Prompt tokens looked up in caches", "model_name"
        )
        self.cached_tokens = self._counter(
            "rtp_prefix_hit_tokens", "Prompt tokens found in a cache", "model_name"
        )
        self.success = self._counter(
            "rtp_request_success", "Choices finished, by reason", "model_name", "finished_reason"
        )
        self._requests = self._tally(
            "rtp_requests",
            "Requests, by how they ended; 499 is a client that left",
            "route",
            "outcome",
            "status",
        )
        self._refusals = self._counter(
            "rtp_refusals", "Requests that ended in an error object", "code"
        )
        self._events = self._tally("rtp_events", "What the scheduling cores noted", "event")
        self.bodies_too_large = self._counter(
            "rtp_bodies_too_large", "Requests over the body limit (413)"
        )
        self._models: dict[str, ModelMetrics] = {}
        self._facts = Facts()
        self.registry.register(self._facts)

    def model(self, model: str) -> ModelMetrics:
        """The series of a model that a worker serves; never called with a client's free text."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self, model)
        return found

    def request(self, route: str, outcome: str, status: int, *, generates: bool) -> None:
        """A request ended. route: one of our own. outcome: ok, failed, refused or disconnected.
        generates: people want to see its rate."""
        self._requests.counts[route, outcome, status] += 1
        if generates:
            self.recent.request(ok=outcome == "ok")

    def refused(self, code: str | None) -> None:
        """An error object was sent; unknown codes share one series."""
        self._refusals.labels(code if code in CODES else "other").inc()

    def note(self, event: str, fields: Mapping[str, object] | None = None) -> None:
        """Counts a core's Note by its name; its fields are for the log, too free for labels."""
        del fields
        counts = self._events.counts
        known = (event,) in counts or len(counts) < MAX_EVENTS
        counts[event if known else "other",] += 1

    def watch(
        self,
        overview: Callable[[], Overview] | None = None,
        loop: LoopTimes | None = None,
        master: Callable[[], bool] | None = None,
    ) -> None:
        """Sources read at scrape time: the cluster as the Master sees it, the loop's own times,
        whether a Master elsewhere is there."""
        self._facts.overview = overview or self._facts.overview
        self._facts.loop = loop or self._facts.loop
        self._facts.master = master or self._facts.master

    def text(self) -> bytes:
        """The exposition, text format 0.0.4."""
        return b"".join(self.slices())

    def slices(self) -> Iterator[bytes]:
        """The same in parts of about a millisecond, so that a scrape of a large fleet need not hold
        up who serves it. Series of one family stay together; families are read one by one."""
        for family in WithAliases(self.registry).collect():
            for start in range(0, len(family.samples) or 1, SLICE):
                yield _text(family, start)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _tally(self, name: str, text: str, *labels: str) -> Tally:
        tally = Tally(name, text, *labels)
        self.registry.register(tally)
        return tally

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)


class _Part(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def _text(family: Metric, start: int) -> bytes:
    """SLICE series of a family; its first part has the two lines that describe it."""
    part = Metric(family.name, family.documentation, family.type)
    part.samples = family.samples[start : start + SLICE]
    text = generate_latest(_Part(part))
    return text if start == 0 else b"".join(text.splitlines(keepends=True)[2:])

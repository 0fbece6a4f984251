"""A counter by labels for what happens tens of thousands of times a second: counting is one
addition, all else waits for the scrape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally(Collector):
    """counts[labels] += 1. Whoever counts bounds the labels."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.counts: defaultdict[tuple[str | int, ...], int] = defaultdict(int)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self.counts.items():
            family.add_metric([str(value) for value in values], count)
        yield family

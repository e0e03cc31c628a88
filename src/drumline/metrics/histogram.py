"""A histogram whose observations cost a binary search and three additions.

The one of `prometheus_client` takes a lock for each of its values, which shows where every token
of every stream is observed. It knows no metric by name.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Histogram(Collector):
    """Observations by the first bound that they do not exceed. Thread: one."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """Show as `name` with these `labels`; `bounds` ascend."""
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = tuple(bounds)
        self._names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._counts = [0] * len(self._names)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, as often as `times` says."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield what was observed so far."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        buckets = zip(self._names, accumulate(self._counts), strict=True)
        family.add_metric(list(self._labels.values()), list(buckets), self._sum)
        yield family

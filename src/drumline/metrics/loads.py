"""Engines' load reports as gauges, read when somebody asks for the metrics."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from drumline.contract.outputs import Load


class LoadCollector(Collector):
    """Shows what `loads` returns: a report for each engine, or nothing while any is stale."""

    # The library finds out whether a collector is one by its base.

    def __init__(
        self, registry: CollectorRegistry, model_name: str, loads: Callable[[], Sequence[Load]]
    ) -> None:
        self._model = model_name
        self._loads = loads
        registry.register(self)

    def describe(self) -> list[GaugeMetricFamily]:
        """Return the gauges without values, so that registering asks for no load."""
        return self._gauges()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the gauges with every engine's values."""
        gauges = self._gauges()
        running, waiting, usage, active, total = gauges
        for rank, load in enumerate(self._loads()):
            labels = [self._model, str(rank)]
            running.add_metric(labels, load.num_running)
            waiting.add_metric(labels, load.num_waiting)
            share = load.kv_active_pages / load.kv_total_pages if load.kv_total_pages else 0.0
            usage.add_metric(labels, share)
            active.add_metric(labels, load.kv_active_pages)
            total.add_metric(labels, load.kv_total_pages)
        yield from gauges

    def _gauges(self) -> list[GaugeMetricFamily]:
        labels = ("model_name", "dp_rank")
        return [
            GaugeMetricFamily(name, text, labels=labels)
            for name, text in (
                ("tokenspeed:num_requests_running", "Requests admitted and not ended"),
                ("tokenspeed:num_requests_waiting", "Requests awaiting admission"),
                ("tokenspeed:kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1"),
                ("drumline:kv_pages_active", "KV pages in use"),
                ("drumline:kv_pages_total", "KV pages of the pool"),
            )
        ]

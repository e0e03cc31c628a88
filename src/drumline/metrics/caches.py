"""Engines' cache tiers as gauges and counters, as far as the engines told of them."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from drumline.contract.census import CacheState


class CacheCollector(Collector):
    """Shows what `states` returns: a state for each engine, or nothing while there is none."""

    # The library finds out whether a collector is one by its base.

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        states: Callable[[], Sequence[CacheState]],
    ) -> None:
        self._model = model_name
        self._states = states
        registry.register(self)

    def describe(self) -> list[Metric]:
        """Return the families without values, so that registering asks nobody."""
        return list(self._families(()))

    def collect(self) -> Iterator[Metric]:
        """Yield all families, with the labels of each engine's rank."""
        yield from self._families(self._states())

    def _families(self, states: Sequence[CacheState]) -> Iterator[Metric]:
        labels = ("model_name", "dp_rank")
        pages = GaugeMetricFamily(
            "drumline:cache_pages",
            "Pages by pool and by what holds them",
            labels=(*labels, "pool", "held_by"),
        )
        moved = {
            name: CounterMetricFamily(f"drumline:cache_{name}", text, labels=(*labels, "tier"))
            for name, text in (
                ("stored_bytes", "Bytes copied to a tier of host memory"),
                ("loaded_bytes", "Bytes copied back from a tier of host memory"),
                ("stored_blocks", "Blocks copied to a tier of host memory"),
                ("loaded_blocks", "Blocks copied back from a tier of host memory"),
            )
        }
        counted = {
            field: CounterMetricFamily(name, text, labels=labels)
            for field, name, text in (
                (
                    "retractions",
                    "tokenspeed:num_preemptions",
                    "Requests suspended for want of KV pages",
                ),
                ("restores", "drumline:cache_restores", "Suspended requests brought back"),
                ("stores", "drumline:cache_stores", "Copies of prefixes to host memory"),
                ("loads", "drumline:cache_loads", "Copies of prefixes back from host memory"),
                (
                    "hit_tokens",
                    "drumline:cache_host_hit_tokens",
                    "Prompt tokens found in host memory",
                ),
                ("cached_tokens", "drumline:cache_hit_tokens", "Prompt tokens found in any tier"),
                ("failed", "drumline:cache_failed_operations", "Copies that failed"),
                ("aborts", "drumline:capacity_aborts", "Requests ended for want of room"),
            )
        }
        now = {
            field: GaugeMetricFamily(f"drumline:{name}", text, labels=labels)
            for field, name, text in (
                ("suspended_requests", "num_requests_suspended", "Requests that are suspended"),
                ("open_operations", "cache_open_operations", "Copies under way"),
            )
        }
        for rank, state in enumerate(states):
            of_rank = [self._model, str(rank)]
            for pool in ("device", "host", "snapshot"):
                census = getattr(state.pools, pool)
                for held_by in ("active", "cached", "empty", "lost"):
                    pages.add_metric([*of_rank, pool, held_by], getattr(census, held_by))
            for tier in ("host", "snapshot"):
                counters = getattr(state.counters, tier)
                for name, family in moved.items():
                    family.add_metric([*of_rank, tier], getattr(counters, name))
            for field, family in counted.items():
                family.add_metric(of_rank, getattr(state.counters, field))
            for field, gauge in now.items():
                gauge.add_metric(of_rank, getattr(state, field))
        yield from (pages, *moved.values(), *counted.values(), *now.values())

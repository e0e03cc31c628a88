"""The metrics of several workers as those of one server.

Counts and histograms add up, and what a worker counted stays when it ends, as counters never
fall. Gauges are those of the workers that live.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct
from prometheus_client import CollectorRegistry, Metric

_KEPT = frozenset({"counter", "histogram"})
_MOST = frozenset({"process_start_time_seconds", "process_max_fds"})
_CREATED = "_created"

Sample = tuple[str, dict[str, str], float]


class Family(Struct, array_like=True, frozen=True):
    """One metric with its samples: name, labels and value."""

    name: str
    kind: str
    text: str
    samples: list[Sample]


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Return what a registry holds."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def kept(families: Sequence[Family]) -> list[Family]:
    """Return those whose values must stay when their worker ends."""
    return [family for family in families if family.kind in _KEPT]


def summed(sources: Sequence[Sequence[Family]]) -> list[Family]:
    """Return the families of all sources as one each."""
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    heads: dict[str, Family] = {}
    for family in (family for source in sources for family in source):
        heads.setdefault(family.name, family)
        known = values.setdefault(family.name, {})
        for name, labels, value in family.samples:
            key = (name, tuple(labels.items()))
            known[key] = _joined(name, known[key], value) if key in known else value
    return [
        Family(
            name,
            head.kind,
            head.text,
            [(sample, dict(labels), value) for (sample, labels), value in values[name].items()],
        )
        for name, head in heads.items()
    ]


def _joined(name: str, one: float, other: float) -> float:
    if name.endswith(_CREATED):
        return min(one, other)
    return max(one, other) if name in _MOST else one + other


class Shown(CollectorRegistry):
    """Families as a registry, to be written as text."""

    def __init__(self, families: Sequence[Family]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric

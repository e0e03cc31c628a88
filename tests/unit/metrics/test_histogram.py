"""Our histogram beside that of the library."""

import random

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from drumline.metrics.histogram import Histogram

BOUNDS = (0.001, 0.05, 1, 2.5)


def test_it_shows_what_the_library_would_show():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = Histogram("a:seconds", "Time", {"model_name": "m"}, BOUNDS, ours)
    other = prometheus_client.Histogram(
        "a:seconds", "Time", ["model_name"], buckets=BOUNDS, registry=theirs
    ).labels("m")
    lots = random.Random(1)
    for value in (0, 0.001, 0.05, 1, 2.5, 7, *(lots.random() * 3 for _ in range(200))):
        one.observe(value)
        other.observe(value)

    def samples(registry):
        text = generate_latest(registry).decode()
        lines = [line for line in text.splitlines() if "_created" not in line]
        return [(line if line[0] == "#" else line.rsplit(" ", 1)[0]) for line in lines], [
            float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"
        ]

    (names, values), (their_names, their_values) = samples(ours), samples(theirs)
    assert names == their_names
    assert [round(value, 6) for value in values] == [round(value, 6) for value in their_values]


def test_a_value_that_is_observed_several_times_at_once_counts_as_often():
    registry = CollectorRegistry()
    one = Histogram("a", "", {}, BOUNDS, registry)
    one.observe(0.5, 3)
    assert registry.get_sample_value("a_count") == 3
    assert registry.get_sample_value("a_sum") == 1.5
    assert registry.get_sample_value("a_bucket", {"le": "1.0"}) == 3
    assert registry.get_sample_value("a_bucket", {"le": "0.05"}) == 0

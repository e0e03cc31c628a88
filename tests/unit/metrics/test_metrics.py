"""Metrics stay consistent, live in the registry they are given, and never fail a request."""

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from drumline.contract.outputs import Load
from drumline.metrics.loads import LoadCollector
from drumline.metrics.requests import RequestMetrics, RequestOutcome

OUTCOME = RequestOutcome(
    reason="stop",
    prompt_tokens=10,
    completion_tokens=4,
    cached_tokens=2,
    total_s=0.5,
    per_token_s=0.01,
)
LABELS = {"model_name": "m"}


def test_two_registries_share_nothing():
    first, second = CollectorRegistry(), CollectorRegistry()
    RequestMetrics(first, "m").ended(OUTCOME)
    RequestMetrics(second, "m")
    assert first.get_sample_value("tokenspeed:prompt_tokens_total", LABELS) == 10
    assert second.get_sample_value("tokenspeed:prompt_tokens_total", LABELS) == 0


def test_reasons_add_up_to_all_requests():
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, "m")
    reasons = ("stop", "length", "abort", "disconnect", "error")
    for reason in reasons:
        metrics.ended(replace(OUTCOME, reason=reason))
    by_reason = [
        registry.get_sample_value("drumline:answers_total", LABELS | {"reason": reason})
        for reason in reasons
    ]
    assert by_reason == [1] * 5
    assert registry.get_sample_value("tokenspeed:num_requests_total", LABELS) == 5
    assert registry.get_sample_value("tokenspeed:request_success_total", LABELS) == 2


def test_figures_that_make_no_sense_count_as_zero():
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, "m")
    metrics.ended(
        RequestOutcome(
            reason="stop",
            prompt_tokens=-1,
            completion_tokens=-1,
            cached_tokens=-5,
            total_s=-1.0,
            per_token_s=-1.0,
        )
    )
    metrics.first_token(-1.0)
    metrics.tokens(3, -1.0)
    for name in ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_hits_total"):
        assert registry.get_sample_value(f"tokenspeed:{name}", LABELS) == 0
    assert registry.get_sample_value("tokenspeed:time_to_first_token_seconds_sum", LABELS) == 0


def test_tokens_that_come_together_share_their_gap():
    registry = CollectorRegistry()
    RequestMetrics(registry, "m").tokens(4, 0.08)
    name = "tokenspeed:inter_token_latency_seconds"
    assert registry.get_sample_value(f"{name}_count", LABELS) == 4
    assert abs(registry.get_sample_value(f"{name}_sum", LABELS) - 0.08) < 1e-9
    assert registry.get_sample_value(f"{name}_bucket", LABELS | {"le": "0.015"}) == 0
    assert registry.get_sample_value(f"{name}_bucket", LABELS | {"le": "0.03"}) == 4


def test_loads_are_read_when_asked_for_and_left_out_when_stale():
    registry = CollectorRegistry()
    loads = []
    LoadCollector(registry, "m", lambda: loads)
    ranked = LABELS | {"dp_rank": "1"}
    assert registry.get_sample_value("tokenspeed:num_requests_running", ranked) is None
    loads += [Load(1, 2, 30, 40), Load(5, 6, 10, 40)]
    assert registry.get_sample_value("tokenspeed:num_requests_running", ranked) == 5
    assert registry.get_sample_value("tokenspeed:num_requests_waiting", ranked) == 6
    assert registry.get_sample_value("tokenspeed:kv_cache_usage_perc", ranked) == 0.25
    loads[:] = [Load(0, 0, 0, 0)]
    assert registry.get_sample_value(
        "tokenspeed:kv_cache_usage_perc", LABELS | {"dp_rank": "0"}
    ) == 0.0  # fmt: skip
    assert list(text_string_to_metric_families(generate_latest(registry).decode()))

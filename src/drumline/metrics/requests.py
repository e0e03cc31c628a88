"""What is counted about requests, as seen from the frontend.

Names that begin with `tokenspeed:` and their meaning are those of the TokenSpeed
engine, so that its dashboards work; the others are ours. All objects live in a
registry that whoever serves it hands in.
"""

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge

from drumline.metrics.histogram import Histogram

_UNDER_A_SECOND = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
_FIRST_TOKEN = (*_UNDER_A_SECOND, 1, 2, 3, 5, 7.5, 10, 20, 40, 80, 160, 640)
_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_TOTAL = (*_UNDER_A_SECOND, 1, 2, 5, 10, 20, 40, 60, 120, 240, 480, 1000)


class RequestOutcome(Struct, frozen=True, kw_only=True):
    """How one answer ended. `per_token_s` is None for fewer than two tokens."""

    reason: str
    """`stop`, `length`, `abort`, `disconnect` (its client left) or `error`."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    total_s: float
    per_token_s: float | None


class RequestMetrics:
    """Counters and histograms of requests to one served model.

    A value that makes no sense, which only a broken engine reports, is counted as
    zero: nothing recorded here may ever fail a request.
    """

    __slots__ = (
        "_answers",
        "_cached",
        "_completion",
        "_first_token",
        "_gap",
        "_model",
        "_not_finite",
        "_per_token",
        "_prompt",
        "_refused",
        "_requests",
        "_success",
        "_total",
        "in_flight",
    )

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        labels = ("model_name",)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, {"model_name": model_name}, buckets, registry)

        self._model = model_name
        self._prompt = counter("tokenspeed:prompt_tokens", "Prompt tokens of ended requests")
        self._completion = counter(
            "tokenspeed:generation_tokens", "Generated tokens of ended requests"
        )
        self._requests = counter("tokenspeed:num_requests", "Requests that ended, however")
        self._success = counter(
            "tokenspeed:request_success", "Requests that ended by stop or length"
        )
        self._cached = counter(
            "tokenspeed:prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        self._not_finite = counter(
            "tokenspeed:num_nan_aborted_requests",
            "Requests that ended because the model's output was not finite",
        )
        self._first_token = histogram(
            "tokenspeed:time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN
        )
        self._per_token = histogram(
            "tokenspeed:request_time_per_output_token_seconds",
            "Mean time per token behind a request's first",
            _PER_TOKEN,
        )
        self._gap = histogram(
            "tokenspeed:inter_token_latency_seconds", "Time from one token to the next", _PER_TOKEN
        )
        self._total = histogram(
            "tokenspeed:e2e_request_latency_seconds", "Arrival to the answer's end", _TOTAL
        )
        self._answers = Counter(
            "drumline:answers", "Answers by how they ended", (*labels, "reason"), registry=registry
        )
        self._refused = Counter(
            "drumline:http_refusals", "Requests refused, by status", ("status",), registry=registry
        )
        self.in_flight = Gauge(
            "drumline:http_requests_in_flight", "Generating requests being served",
            registry=registry,
        )  # fmt: skip

    def first_token(self, seconds: float) -> None:
        """Note an answer's first token, `seconds` behind its request's arrival."""
        self._first_token.observe(max(seconds, 0.0))

    def tokens(self, count: int, seconds: float) -> None:
        """Note `count` tokens that came together, `seconds` behind those before them."""
        self._gap.observe(max(seconds, 0.0) / count, count)

    def ended(self, outcome: RequestOutcome) -> None:
        """Note the end of an answer."""
        self._requests.inc()
        if outcome.reason in ("stop", "length"):
            self._success.inc()
        self._answers.labels(self._model, outcome.reason).inc()
        self._prompt.inc(max(outcome.prompt_tokens, 0))
        self._completion.inc(max(outcome.completion_tokens, 0))
        self._cached.inc(max(outcome.cached_tokens, 0))
        self._total.observe(max(outcome.total_s, 0.0))
        if outcome.per_token_s is not None:
            self._per_token.observe(max(outcome.per_token_s, 0.0))

    def not_finite(self) -> None:
        """Note a request that the engine gave up for want of finite logits."""
        self._not_finite.inc()

    def refused(self, status: int) -> None:
        """Note a request that was answered with an error."""
        self._refused.labels(str(status)).inc()

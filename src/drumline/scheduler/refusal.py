"""Whether a batch of submitted requests can be taken, and why not."""

from collections.abc import Sequence

from drumline.core.config import Role
from drumline.core.hashing import DIGEST_BYTES
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.events import RequestSpec
from drumline.scheduler.line import Line
from drumline.scheduler.requests import RequestTable


def refusal(
    specs: Sequence[RequestSpec],
    requests: RequestTable,
    config: SchedulerConfig,
    max_request_tokens: int,
) -> str | None:
    """Return why `specs` cannot be taken as a whole, or None."""
    seen: set[str] = set()
    for spec in specs:
        if spec.rid in seen or spec.rid in requests:
            return f"request {spec.rid}: the id is taken by a live request"
        seen.add(spec.rid)
        reason = _unfit(spec, config, max_request_tokens)
        if reason is not None:
            return f"request {spec.rid}: {reason}"
    return None


def crowded(
    requests: int, tokens: int, line: Line, free_rows: int, config: SchedulerConfig
) -> str | None:
    """Return why so many more requests, of `tokens` prompt tokens in all, may not wait, or None."""
    if config.max_queued_requests is None and config.max_queued_tokens is None:
        return None
    limit, waiting = config.max_queued_requests, len(line)
    if limit is not None and waiting + requests - free_rows > limit:
        return (
            f"{waiting} requests wait and {free_rows} rows are free: with {requests} more, the "
            f"queue's limit of {limit} requests is exceeded"
        )
    limit = config.max_queued_tokens
    if limit is not None and waiting + requests > 1 and line.tokens + tokens > limit:
        return (
            f"{line.tokens} prompt tokens wait: with {tokens} more, the queue's limit of "
            f"{limit} tokens is exceeded"
        )
    return None


def _unfit(spec: RequestSpec, config: SchedulerConfig, max_request_tokens: int) -> str | None:
    tokens = len(spec.tokens)
    if not tokens:
        return "the prompt is empty"
    if spec.max_new_tokens < 0:
        return f"max_new_tokens is {spec.max_new_tokens}, below 0"
    if spec.max_cached_prefix_tokens < 0:
        return f"max_cached_prefix_tokens is {spec.max_cached_prefix_tokens}, below 0"
    # A prefill engine computes the prompt, and its peer the answer.
    answer = max(spec.max_new_tokens, config.decode_tokens)
    if config.role is Role.PREFILL:
        answer = 0
    if tokens + answer > max_request_tokens:
        return (
            f"{tokens} prompt tokens and {answer} to generate are more than the "
            f"{max_request_tokens} that one request has room for"
        )
    pages = tokens // config.prefix_granularity
    if spec.page_digests and len(spec.page_digests) != pages * DIGEST_BYTES:
        return (
            f"{len(spec.page_digests)} bytes of page digests for {pages} pages "
            f"of {config.prefix_granularity} tokens"
        )
    return None

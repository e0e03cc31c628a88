"""A batch of an engine's outputs, cut into what each of its requests produced.

It knows the batch's columns and not who waits for a request.
"""

import logging
from collections.abc import Iterator

from drumline.client.stream import Delta
from drumline.wire.output import BatchTokenIDOutSlim

log = logging.getLogger(__name__)

_FINISHED_REASONS = frozenset({"", "stop", "length", "abort"})


def deltas(batch: BatchTokenIDOutSlim) -> Iterator[tuple[str, Delta]]:
    """Yield a request's id and what is new of it, a row each.

    The batch must not be `ragged`; its lists belong to the deltas from then on.
    """
    fill = _Extras(batch) if _Extras.any(batch) else None
    rows = zip(
        batch.rids,
        batch.output_ids,
        batch.finished_reasons,
        batch.prompt_tokens,
        batch.completion_tokens,
        batch.cached_tokens,
        strict=True,
    )
    for row, (rid, ids, reason, prompt, completion, cached) in enumerate(rows):
        if reason not in _FINISHED_REASONS:
            log.warning("%s finished with %r, taken as stop", rid, reason)
            reason = "stop"  # noqa: PLW2901
        delta = Delta(ids, reason, prompt, completion, cached)
        if fill is not None:
            fill(delta, row)
        yield rid, delta


class _Extras:
    """The columns of a batch that most requests do not ask for."""

    __slots__ = ("_batch",)

    def __init__(self, batch: BatchTokenIDOutSlim) -> None:
        self._batch = batch

    @staticmethod
    def any(batch: BatchTokenIDOutSlim) -> bool:
        """Whether some row of the batch has one of them."""
        return bool(
            batch.output_token_logprobs_val
            or batch.finish_reason_details
            or batch.input_token_logprobs_val
        )

    def __call__(self, delta: Delta, row: int) -> None:
        """Fill in a row's."""
        batch = self._batch
        if batch.output_token_logprobs_val and batch.output_token_logprobs_idx:
            delta.logprobs = batch.output_token_logprobs_val[row]
            delta.logprob_ids = batch.output_token_logprobs_idx[row]
        if batch.output_top_logprobs_val and batch.output_top_logprobs_idx:
            delta.top_logprobs = batch.output_top_logprobs_val[row]
            delta.top_logprob_ids = batch.output_top_logprobs_idx[row]
        if batch.input_token_logprobs_val and batch.input_token_logprobs_idx:
            delta.input_logprobs = batch.input_token_logprobs_val[row]
            delta.input_logprob_ids = batch.input_token_logprobs_idx[row]
        if batch.input_top_logprobs_val and batch.input_top_logprobs_idx:
            delta.input_top_logprobs = batch.input_top_logprobs_val[row] or ()
            delta.input_top_logprob_ids = batch.input_top_logprobs_idx[row] or ()
        if batch.finish_reason_details:
            delta.details = batch.finish_reason_details[row]

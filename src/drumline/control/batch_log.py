"""The operator's line per batch: every batch with prompts, and every few decode batches.

It is handed what it prints and looks at nothing itself; a round whose lines are not
shown only counts.
"""

import logging

from drumline.contract.outputs import Load
from drumline.contract.plan import Batch

DECODE_INTERVAL = 40
"""Decode batches a line."""

_log = logging.getLogger("drumline.batch")


class BatchLog:
    """Counts batches and says what they were."""

    def __init__(self, dp_rank: int = 0, decode_interval: int = DECODE_INTERVAL) -> None:
        self._dp_rank = dp_rank
        self._interval = decode_interval
        self._decodes = 0
        self._tokens = 0
        self._since_us = -1

    def due(self, batch: Batch) -> bool:
        """Whether this batch gets a line; counts it."""
        if batch.extends:
            return _log.isEnabledFor(logging.INFO)
        self._decodes += 1
        return self._decodes % self._interval == 0 and _log.isEnabledFor(logging.INFO)

    def committed(self, tokens: int) -> None:
        """Count tokens that a forward produced."""
        self._tokens += tokens

    def write(
        self, batch: Batch, cached_tokens: int, load: Load, cached_pages: int, now_us: int
    ) -> None:
        """Write the line of a batch; `cached_tokens` are what its new requests found cached.

        `load` is what the engine holds as the batch is dispatched, beside `cached_pages`
        that are held by nobody.
        """
        if batch.extends:
            kind = "Prefill" if batch.extends == batch.size else "Mix"
            _log.info(
                "%s batch. #dp-rank: %d, #new-seq: %d, #new-token: %d, #cached-token: %d, "
                "#running-req: %d, #queue-req: %d",
                kind,
                self._dp_rank,
                batch.extends,
                len(batch.extend_ids),
                cached_tokens,
                load.num_running,
                load.num_waiting,
            )
            return
        seconds = (now_us - self._since_us) / 1e6 if self._since_us >= 0 else 0.0
        rate = self._tokens / seconds if seconds else 0.0
        lengths = int(batch.prefix_lengths.sum()) + batch.tokens
        _log.info(
            "Decode batch. #dp-rank: %d, #running-req: %d, avg_seq_len: %.1f, "
            "#pages(active/cached/total): %d/%d/%d, page ratio: %.2f, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            self._dp_rank,
            load.num_running,
            lengths / batch.size,
            load.kv_active_pages,
            cached_pages,
            load.kv_total_pages,
            load.kv_active_pages / max(load.kv_total_pages, 1),
            rate,
            load.num_waiting,
        )
        self._tokens = 0
        self._since_us = now_us

"""One forward: a batch of rows in, their next tokens out; or a stage's part of it.

It feeds the model and the sampler and keeps each row's last token, so that a
decode needs nothing from the host. It does not know blocks' owners or requests'
states, nor when a forward runs.

Thread: forward thread only.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from drumline.contract.arrays import NO_INTS, IntArray
from drumline.contract.plan import Batch
from drumline.contract.ports import DpRound, HistorySeeds, LogprobPlan
from drumline.contract.request import Pooling
from drumline.contract.result import ForwardResult, RowLogprobs, RowPooled
from drumline.core.errors import InvariantError
from drumline.device.attention import Attention, AttentionBatch, LayerFence
from drumline.device.graphs import DecodeGraphs
from drumline.device.history import TokenHistory
from drumline.device.kv import BlockShape, BlockTable
from drumline.device.landing import Landing
from drumline.device.models.decoder import Decoder
from drumline.device.parallel import Passage
from drumline.device.sampling.logprobs import SpanLooked, span_of
from drumline.device.sampling.sampler import Sampled, Sampler
from drumline.device.staging import Array, Download, all_on_device


class _Pooling(Struct, frozen=True, eq=False):
    """What a chunk adds to its prompt's vector, where it was computed."""

    index: int
    start: int
    tokens: int
    values: Tensor

    def told(self, arrays: Iterator[Array]) -> RowPooled:
        """Return it as host values; `arrays` go on with its own."""
        return RowPooled(self.index, self.start, self.tokens, tuple(next(arrays).tolist()))


class Executor:
    """Runs batches on a model.

    A row's state, `row_words` 64-bit words, is the token it sampled last. What penalties
    count is kept by request, in the sampler, and outlives the row anyway; a history of tokens
    is seeded anew.
    """

    row_words = 1

    __slots__ = (
        "_attention",
        "_device",
        "_graphs",
        "_history",
        "_last",
        "_model",
        "_passage",
        "_sampler",
        "_shape",
    )

    def __init__(
        self,
        model: Decoder,
        attention: Attention,
        sampler: Sampler,
        rows: int,
        shape: BlockShape,
        passage: Passage,
        history: TokenHistory | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`graphs` are of a model that looks back on no tokens."""
        self._graphs = graphs
        self._history = history
        self._model = model
        self._passage = passage
        self._attention = attention
        self._sampler = sampler
        self._shape = shape
        self._device = attention.pool.device
        self._last = torch.zeros(rows, dtype=torch.int64, device=self._device)

    def let_go(self) -> None:
        """Drop the model; nothing may run until `replace` gives another."""
        self.forget()
        del self._model

    def replace(self, model: Decoder) -> None:
        """Compute with other weights from now on."""
        self._model = model
        self.record()

    @torch.inference_mode()
    def record(self) -> None:
        """Record decodes anew, where they are recorded at all and there is memory to write to.

        Waits for the device.
        """
        if self._graphs is not None and not self._attention.pool.away:
            model, attention = self._model, self._attention
            self._graphs.record(lambda fed, batch: model.hidden(fed, batch, attention))

    def forget(self) -> None:
        """Drop what was recorded, as weights or pool are going to lie elsewhere."""
        if self._graphs is not None:
            self._graphs.drop()

    def run(
        self,
        batch: Batch,
        table: BlockTable,
        wanted: LogprobPlan | None,
        seeds: HistorySeeds | None = None,
        fence: LayerFence | None = None,
    ) -> ForwardResult | Landing[ForwardResult]:
        """Compute a batch and return what it sampled. The batch feeds at least one token.

        What a device has still to compute lands later. A stage that is not the last hands its
        part on, and samples nothing.
        `seeds` are what new owners of rows have read before. `fence` guards what the batch's plan
        loads, layer by layer.
        """
        starts = np.cumsum(batch.input_lengths) - batch.input_lengths
        ends = batch.prefix_lengths + batch.input_lengths
        sampling = np.ones(batch.size, np.bool_)
        sampling[: batch.extends] = ends[: batch.extends] >= batch.prompt_lengths
        chosen = np.flatnonzero(sampling).astype(np.int32)
        rows = batch.rows[chosen]
        ids, last, drawing = self._inputs(batch, (starts + batch.input_lengths - 1)[chosen], rows)
        hidden = self._hidden(batch, table, ids, seeds, fence)
        if not self._passage.last:
            self._passage.send(hidden)
            return ForwardResult(tokens=NO_INTS, counts=np.zeros(batch.size, np.int32))
        prompts: tuple[SpanLooked, ...] = ()
        if wanted is not None and len(wanted.prompts):
            prompts = self._prompt_logprobs(hidden, batch, starts, wanted)
        pooled: tuple[_Pooling, ...] = ()
        if wanted is not None and len(wanted.pooled):
            pooled = self._pooled(hidden, batch, starts, wanted.pooled)
        sampled = None
        if len(chosen):
            logits = self._model.logits(hidden[last])
            sampled = self._sampler.sample(logits, rows, ends[chosen], _among(chosen, wanted))
            self._last[drawing] = sampled.tokens
        landing = _landing(sampling, chosen, sampled, prompts, pooled, wanted, self._device)
        return landing.land() if landing.here else landing

    def _hidden(
        self,
        batch: Batch,
        table: BlockTable,
        ids: Tensor,
        seeds: HistorySeeds | None,
        fence: LayerFence | None,
    ) -> Tensor:
        """Return what the last layer makes of each token; by a recording, where there is one."""
        fed = ids if self._passage.first else self._passage.received(len(ids))
        graphs = self._graphs
        # A recording waits for no layer's part of a load.
        if graphs is not None and fence is None and not batch.extends and graphs.holds(batch.size):
            hidden = graphs.hidden(fed, batch.rows, batch.prefix_lengths)
            # The next one writes to the same place, which may still be on its way.
            return hidden if self._passage.last else hidden.clone()
        place = AttentionBatch(
            table, batch.rows, batch.input_lengths, batch.prefix_lengths, self._shape, self._device
        )
        if self._history is not None:
            if seeds is not None:
                self._history.seed(seeds)
            place.history = self._history.append(
                batch.rows, batch.input_lengths, place.positions, ids
            )
        return self._model.hidden(fed, place, self._attention, fence)

    def _pooled(
        self, hidden: Tensor, batch: Batch, starts: IntArray, indices: IntArray
    ) -> tuple[_Pooling, ...]:
        """Return what the chunks of these batch indices add to their prompts' vectors."""
        chunks = []
        for index in indices.tolist():
            start, place = int(batch.prefix_lengths[index]), int(starts[index])
            end = min(start + int(batch.input_lengths[index]), int(batch.prompt_lengths[index]))
            tokens = end - start
            pooling = self._sampler.resident(batch.rows[index]).admission.pooling
            first = place + tokens - 1 if pooling is Pooling.LAST else place
            values = self._model.normed(hidden[first : place + tokens]).sum(0)
            chunks.append(_Pooling(index, start, tokens, values))
        return tuple(chunks)

    def _prompt_logprobs(
        self, hidden: Tensor, batch: Batch, starts: IntArray, wanted: LogprobPlan
    ) -> tuple[SpanLooked, ...]:
        """Look up what the chunks `wanted` tell of their prompts' tokens."""
        spans = []
        for index, top in zip(map(int, wanted.prompts), map(int, wanted.prompts_top), strict=True):
            admission = self._sampler.resident(batch.rows[index]).admission
            start, length = int(batch.prefix_lengths[index]), int(batch.input_lengths[index])
            spans.append(span_of(index, top, admission, start, length, int(starts[index])))
        return self._sampler.prompt_logprobs(spans, lambda rows: self._model.logits(hidden[rows]))

    def export_row(self, row: int, state: Tensor) -> None:
        """Write a row's state to `state`, int64 `[row_words]`, on the device."""
        state[0] = self._last[row]

    def import_row(self, row: int, state: Tensor) -> None:
        """Give a row the state that `export_row` wrote, of whichever row."""
        self._last[row] = state[0]

    def idle(self, dp: DpRound) -> None:
        """Take part in the exchanges of the other replicas' forwards.

        A dense decoder has none: its layers lie whole in each replica, so there is nothing
        to compute for others.
        """
        if not dp.idle:
            raise InvariantError(f"an idle forward in a round with a batch: {dp}")

    def _inputs(
        self, batch: Batch, last: IntArray, rows: IntArray
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens that a batch feeds, and `last` and `rows` on the device."""
        decodes = batch.rows[batch.extends :]
        if (batch.input_lengths[batch.extends :] != 1).any():
            raise InvariantError("a decode row feeds one token")
        named = NO_INTS if batch.decode_ids is None else batch.decode_ids
        # One way up for all of it.
        extended, decoding, told, last_at, rows_at = all_on_device(
            self._device,
            *(each.astype(np.int64) for each in (batch.extend_ids, decodes, named, last, rows)),
        )
        if not len(decodes):
            return extended, last_at, rows_at
        fed = self._last[decoding]
        if batch.decode_ids is not None:
            fed = told.where(told >= 0, fed)
        return torch.cat((extended, fed)), last_at, rows_at


def _landing(
    sampling: NDArray[np.bool_],
    chosen: IntArray,
    sampled: Sampled | None,
    prompts: Sequence[SpanLooked],
    pooled: Sequence[_Pooling],
    wanted: LogprobPlan | None,
    device: torch.device,
) -> Landing[ForwardResult]:
    """Bring what a forward computed to the host, where it becomes a result."""
    tensors: list[Tensor] = []
    if sampled is not None:
        tensors += sampled.tokens, sampled.bad, sampled.stuck
        tensors += (tensor for looked in sampled.looked for tensor in looked.tensors)
    tensors += (tensor for span in prompts for tensor in span.tensors)
    tensors += (each.values for each in pooled)

    def made(values: list[Array]) -> ForwardResult:
        counts = sampling.astype(np.int32)
        arrays = iter(values)
        if sampled is None:
            return ForwardResult(
                tokens=chosen,
                counts=counts,
                logprobs=_none_sampled(wanted),
                prompt_logprobs=tuple(span.told(arrays) for span in prompts),
                pooled=tuple(each.told(arrays) for each in pooled),
            )
        tokens, bad, stuck = next(arrays), next(arrays), next(arrays)
        told = tuple(row for looked in sampled.looked for row in looked.told(arrays))
        return ForwardResult(
            tokens=tokens.astype(np.int32),
            counts=counts,
            nan_indices=chosen[bad],
            grammar_faults=chosen[list(sampled.faults)] if sampled.faults else NO_INTS,
            stuck=chosen[stuck],
            processor_faults=chosen[list(sampled.failed)] if sampled.failed else NO_INTS,
            logprobs=_by_batch_index(chosen, told, wanted),
            prompt_logprobs=tuple(span.told(arrays) for span in prompts),
            pooled=tuple(each.told(arrays) for each in pooled),
        )

    return Landing(Download(tensors, device), made)


def _among(chosen: IntArray, wanted: LogprobPlan | None) -> LogprobPlan | None:
    """Return the log probabilities wanted, by place among the rows that sample."""
    if wanted is None:
        return None
    held = np.isin(wanted.indices, chosen)
    places = np.searchsorted(chosen, wanted.indices[held]).astype(np.int32)
    return LogprobPlan(places, wanted.top[held])


def _none_sampled(wanted: LogprobPlan | None) -> tuple[RowLogprobs, ...]:
    return () if wanted is None else tuple(RowLogprobs(int(i), ()) for i in wanted.indices)


def _by_batch_index(
    chosen: IntArray, found: tuple[RowLogprobs, ...], wanted: LogprobPlan | None
) -> tuple[RowLogprobs, ...]:
    """Return an entry for every index wanted, empty for a row that did not sample."""
    if wanted is None:
        return ()
    by_index = {
        int(chosen[row.index]): RowLogprobs(
            int(chosen[row.index]), row.sampled, row.top_values, row.top_ids
        )
        for row in found
    }
    return tuple(by_index.get(int(i)) or RowLogprobs(int(i), ()) for i in wanted.indices)

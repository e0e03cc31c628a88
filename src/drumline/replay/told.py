"""What the fake plane tells of tokens besides: made-up log probabilities and vectors.

They follow from the tokens' ids, so that a number at the wrong place shows.
"""

from collections.abc import Sequence

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.contract.plan import Batch
from drumline.contract.ports import LogprobPlan
from drumline.contract.request import Admission, Pooling
from drumline.contract.result import RowLogprobs, RowPooled


def logprobs(
    asked: LogprobPlan | None, tokens: IntArray, counts: IntArray
) -> tuple[RowLogprobs, ...]:
    """Return those of tokens that were drawn: the k-th best id of token t is t + k."""
    if asked is None:
        return ()
    starts = np.cumsum(counts) - counts
    rows = []
    for index, top in zip(asked.indices.tolist(), asked.top.tolist(), strict=True):
        token = int(tokens[starts[index]])
        best = tuple(range(token, token + top))
        values = tuple(-0.5 - k for k in range(top))
        rows.append(RowLogprobs(index, (-0.5,), (values,), (best,)))
    return tuple(rows)


def prompt_logprobs(
    asked: LogprobPlan | None, batch: Batch, requests: Sequence[Admission]
) -> tuple[RowLogprobs, ...]:
    """Return those of prompts, of the request at each of the batch's rows: of token t it is -t."""
    told = []
    for index in () if asked is None else asked.prompts.tolist():
        request = requests[index]
        start = int(batch.prefix_lengths[index])
        end = min(start + int(batch.input_lengths[index]), request.prompt_tokens - 1)
        first = max(start, request.prompt_logprobs_from)
        tokens = request.prompt_ids[first + 1 : end + 1].tolist()
        told.append(RowLogprobs(index, tuple(-float(token) for token in tokens)))
    return tuple(told)


def pooled(
    asked: LogprobPlan | None, batch: Batch, requests: Sequence[Admission]
) -> tuple[RowPooled, ...]:
    """Return vectors of one number, which for a token is its id."""
    chunks = []
    begins = np.cumsum(batch.input_lengths) - batch.input_lengths
    for index in () if asked is None else asked.pooled.tolist():
        start, begin = int(batch.prefix_lengths[index]), int(begins[index])
        end = min(start + int(batch.input_lengths[index]), int(batch.prompt_lengths[index]))
        ids = batch.extend_ids[begin : begin + end - start].tolist()
        last = requests[index].pooling is Pooling.LAST
        value = float(ids[-1] if last else sum(ids))
        chunks.append(RowPooled(index, start, end - start, (value,)))
    return tuple(chunks)

"""Log probabilities: of the tokens that stand somewhere, of the likeliest, of ids by name.

All are the model's own, before any edit. Work over the vocabulary is done for the rows that
are given, which are those that ask.
"""

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.contract.ports import LogprobPlan
from drumline.contract.request import Admission
from drumline.contract.result import RowLogprobs

_ROWS_AT_A_TIME = 256

Told = tuple[tuple[float, ...], tuple[int, ...]]
"""Log probabilities at one place beside the token's own, and whose: the likeliest first, the
largest in front, then those asked for by name."""


def row_logprobs(
    logits: Tensor, tokens: Tensor, wanted: LogprobPlan, named: Sequence[tuple[int, ...]]
) -> tuple[RowLogprobs, ...]:
    """Return what the rows `wanted` ask, whose logits are `logits`, `[rows, vocab]`.

    Row `i` drew `tokens[i]` and asks for the ids `named[i]` besides.
    """
    own, told = told_at(logits, tokens, wanted.top, named)
    entries = []
    for place, index in enumerate(map(int, wanted.indices)):
        values, ids = told[place]
        entries.append(
            RowLogprobs(index, (own[place],), (values,) if ids else (), (ids,) if ids else ())
        )
    return tuple(entries)


class PromptSpan(Struct, frozen=True, eq=False):
    """A stretch of one chunk whose next tokens' log probabilities are told.

    `tokens` are those next tokens, and `first` is where the token before the first of them
    stands in the batch.
    """

    index: int
    first: int
    tokens: IntArray
    top: int
    named: tuple[int, ...]


def span_of(
    index: int, top: int, admission: Admission, start: int, length: int, place: int
) -> PromptSpan:
    """Return what a chunk tells that holds `length` tokens of a prompt behind the first `start`.

    `place` is where it begins in the batch. The token behind a chunk's last belongs to it, the
    one behind the prompt's last is the answer's.
    """
    first = max(start, admission.prompt_logprobs_from)
    last = min(start + length, admission.prompt_tokens - 1)
    tokens = admission.prompt_ids[first + 1 : last + 1]
    return PromptSpan(index, place + first - start, tokens, top, admission.logprob_ids)


def prompt_logprobs(
    spans: Sequence[PromptSpan], logits_of: Callable[[Tensor], Tensor]
) -> tuple[RowLogprobs, ...]:
    """Return what each span tells. `logits_of` computes the logits of tokens of the batch.

    Rows are computed some at a time: those of a long prompt would fill the memory.
    """
    told: list[RowLogprobs] = []
    for span in spans:
        own: list[float] = []
        others: list[Told] = []
        for start in range(0, len(span.tokens), _ROWS_AT_A_TIME):
            tokens = span.tokens[start : start + _ROWS_AT_A_TIME]
            rows = torch.arange(len(tokens)) + span.first + start
            values, besides = told_at(
                logits_of(rows),
                torch.from_numpy(tokens.astype(np.int64)),
                np.full(len(tokens), span.top, np.int32),
                [span.named] * len(tokens),
            )
            own += values
            others += besides
        wanted = span.top or span.named
        told.append(
            RowLogprobs(
                span.index,
                tuple(own),
                tuple(values for values, _ in others) if wanted else (),
                tuple(ids for _, ids in others) if wanted else (),
            )
        )
    return tuple(told)


def told_at(
    logits: Tensor, tokens: Tensor, top: IntArray, named: Sequence[tuple[int, ...]]
) -> tuple[list[float], list[Told]]:
    """Return, for each row of `logits`, the log probability of its token, and what else is told."""
    logprobs = logits.log_softmax(1)
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    most = min(int(top.max(initial=0)), logits.shape[1])
    best, ids = (part.tolist() for part in logprobs.topk(most, 1))
    columns = torch.tensor([id_ for each in named for id_ in each], dtype=torch.int64)
    rows = torch.from_numpy(np.repeat(np.arange(len(named)), [len(each) for each in named]))
    by_name = iter(logprobs[rows, columns].tolist())
    told: list[Told] = []
    for row, count in enumerate(map(int, top)):
        values = (*best[row][:count], *islice(by_name, len(named[row])))
        told.append((values, (*ids[row][:count], *named[row])))
    return own, told

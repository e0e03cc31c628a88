"""Log probabilities: of the tokens that stand somewhere, of the likeliest, of ids by name.

All are the model's own, before any edit. Work over the vocabulary is done for the rows that
are given, which are those that ask.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.contract.ports import LogprobPlan
from drumline.contract.request import Admission
from drumline.contract.result import RowLogprobs
from drumline.device.kernels.native import Machine

_ROWS_AT_A_TIME = 256

Told = tuple[tuple[float, ...], tuple[int, ...]]
"""Log probabilities at one place beside the token's own, and whose: the likeliest first, the
largest in front, then those asked for by name."""


def row_logprobs(
    logits: Tensor,
    tokens: Tensor,
    wanted: LogprobPlan,
    named: Sequence[tuple[int, ...]],
    places: Tensor | None = None,
    machine: Machine | None = None,
) -> tuple[RowLogprobs, ...]:
    """Return what the rows `wanted` ask, whose logits are `logits`, `[rows, vocab]`.

    Row `i` drew `tokens[i]` and asks for the ids `named[i]` besides. With `places`, those are
    the rows of `logits` that are meant. Kernels do it where there is a `machine` to run them.
    """
    own, told = told_at(logits, tokens, wanted.top, named, places, machine)
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
    spans: Sequence[PromptSpan],
    logits_of: Callable[[Tensor], Tensor],
    machine: Machine | None = None,
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
                machine=machine,
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
    logits: Tensor,
    tokens: Tensor,
    top: IntArray,
    named: Sequence[tuple[int, ...]],
    places: Tensor | None = None,
    machine: Machine | None = None,
) -> tuple[list[float], list[Told]]:
    """Return, for each row of `logits`, the log probability of its token, and what else is told.

    With `places`, those rows of `logits` alone are meant.
    """
    most = min(int(top.max(initial=0)), logits.shape[1])
    look = _looked_at if machine is None else partial(_looked_at_by_kernels, machine)
    own, best, ids, by_name = look(logits, tokens, top, most, named, places)
    others = iter(by_name)
    told: list[Told] = []
    for row, count in enumerate(map(int, top)):
        values = (*best[row][:count], *islice(others, len(named[row])))
        told.append((values, (*ids[row][:count], *named[row])))
    return own, told


_Look = tuple[list[float], list[list[float]], list[list[int]], list[float]]
"""Log probabilities of the rows' tokens, of their likeliest and whose those are, and by name."""


def _looked_at(
    logits: Tensor,
    tokens: Tensor,
    _top: IntArray,
    most: int,
    named: Sequence[tuple[int, ...]],
    places: Tensor | None,
) -> _Look:
    logprobs = (logits if places is None else logits[places]).log_softmax(1)
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    best, ids = (part.tolist() for part in logprobs.topk(most, 1))
    columns = torch.tensor([id_ for each in named for id_ in each], dtype=torch.int64)
    rows = torch.from_numpy(np.repeat(np.arange(len(named)), [len(each) for each in named]))
    return own, best, ids, logprobs[rows, columns].tolist()


def _looked_at_by_kernels(
    machine: Machine,
    logits: Tensor,
    tokens: Tensor,
    top: IntArray,
    most: int,
    named: Sequence[tuple[int, ...]],
    places: Tensor | None,
) -> _Look:
    rows, vocab = len(tokens), logits.shape[1]
    at = torch.arange(rows) if places is None else places
    starts = torch.zeros(rows + 1, dtype=torch.int64)
    starts[1:] = torch.tensor([len(each) for each in named]).cumsum(0)
    columns = torch.tensor([id_ for each in named for id_ in each], dtype=torch.int64)
    counts = torch.from_numpy(np.minimum(top, vocab).astype(np.int32))
    own, by_name = torch.empty(rows), torch.empty(len(columns))
    best = torch.zeros((rows, most))
    ids = torch.zeros((rows, most), dtype=torch.int64)
    machine.run(
        "tell",
        logits.data_ptr(),
        vocab,
        rows,
        at.data_ptr(),
        tokens.contiguous().data_ptr(),
        counts.data_ptr(),
        most,
        *(each.data_ptr() for each in (starts, columns, own, best, ids, by_name)),
    )
    return own.tolist(), best.tolist(), ids.tolist(), by_name.tolist()

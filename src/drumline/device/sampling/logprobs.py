"""Log probabilities: of the tokens that stand somewhere, of the likeliest, of ids by name.

All are the model's own, before any edit. Work over the vocabulary is done for the rows that
are given, which are those that ask. What was looked up is told once it is on the host, for which
nobody waits here.
"""

from collections.abc import Callable, Iterator, Sequence
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
from drumline.device.staging import Array, all_on_device, on_device

_ROWS_AT_A_TIME = 256

Told = tuple[tuple[float, ...], tuple[int, ...]]
"""Log probabilities at one place beside the token's own, and whose: the likeliest first, the
largest in front, then those asked for by name."""


class Looked(Struct, frozen=True, eq=False):
    """What was looked up at some rows, where it was computed.

    Log probabilities of the rows' tokens, `[rows]`, of their likeliest, `[rows, most]`, and whose
    those are, and of the ids by name, one behind the other. Row `i` is told the `top[i]` likeliest
    and the ids `named[i]`.
    """

    own: Tensor
    best: Tensor
    ids: Tensor
    by_name: Tensor
    top: IntArray
    named: Sequence[tuple[int, ...]]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What must be on the host before it is told, in this order."""
        return self.own, self.best, self.ids, self.by_name

    def told(self, arrays: Iterator[Array]) -> tuple[list[float], list[Told]]:
        """Return, for each row, the log probability of its token, and what else is told.

        `arrays` go on with `tensors`, which are taken from them.
        """
        own, best, ids, by_name = (next(arrays).tolist() for _ in self.tensors)
        others = iter(by_name)
        told: list[Told] = []
        for row, count in enumerate(map(int, self.top)):
            values = (*best[row][:count], *islice(others, len(self.named[row])))
            told.append((values, (*ids[row][:count], *self.named[row])))
        return own, told


class RowsLooked(Struct, frozen=True, eq=False):
    """What was looked up for the rows `indices`, whose tokens were drawn."""

    indices: IntArray
    looked: Looked

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.looked.tensors

    def told(self, arrays: Iterator[Array]) -> tuple[RowLogprobs, ...]:
        """Return what the rows ask; see `Looked.told`."""
        own, told = self.looked.told(arrays)
        entries = []
        for place, index in enumerate(map(int, self.indices)):
            values, ids = told[place]
            entries.append(
                RowLogprobs(index, (own[place],), (values,) if ids else (), (ids,) if ids else ())
            )
        return tuple(entries)


def row_logprobs(
    logits: Tensor,
    tokens: Tensor,
    wanted: LogprobPlan,
    named: Sequence[tuple[int, ...]],
    places: Tensor | None = None,
    machine: Machine | None = None,
) -> RowsLooked:
    """Look up what the rows `wanted` ask, whose logits are `logits`, `[rows, vocab]`.

    Row `i` drew `tokens[i]` and asks for the ids `named[i]` besides. With `places`, those are
    the rows of `logits` that are meant. Kernels do it where there is a `machine` to run them.
    """
    return RowsLooked(wanted.indices, look_up(logits, tokens, wanted.top, named, places, machine))


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


class SpanLooked(Struct, frozen=True, eq=False):
    """What was looked up for a span, some rows at a time."""

    span: PromptSpan
    parts: tuple[Looked, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    def told(self, arrays: Iterator[Array]) -> RowLogprobs:
        """Return what the span tells; see `Looked.told`."""
        own: list[float] = []
        others: list[Told] = []
        for part in self.parts:
            values, besides = part.told(arrays)
            own += values
            others += besides
        wanted = self.span.top or self.span.named
        return RowLogprobs(
            self.span.index,
            tuple(own),
            tuple(values for values, _ in others) if wanted else (),
            tuple(ids for _, ids in others) if wanted else (),
        )


def prompt_logprobs(
    spans: Sequence[PromptSpan],
    logits_of: Callable[[Tensor], Tensor],
    device: torch.device,
    machine: Machine | None = None,
) -> tuple[SpanLooked, ...]:
    """Look up what each span tells. `logits_of` computes the logits of tokens of the batch.

    Rows are computed some at a time: those of a long prompt would fill the memory.
    """
    found: list[SpanLooked] = []
    for span in spans:
        parts = []
        for start in range(0, len(span.tokens), _ROWS_AT_A_TIME):
            tokens = span.tokens[start : start + _ROWS_AT_A_TIME]
            rows = torch.arange(len(tokens), device=device) + span.first + start
            parts.append(
                look_up(
                    logits_of(rows),
                    on_device(device, tokens.astype(np.int64)),
                    np.full(len(tokens), span.top, np.int32),
                    [span.named] * len(tokens),
                    machine=machine,
                )
            )
        found.append(SpanLooked(span, tuple(parts)))
    return tuple(found)


def look_up(
    logits: Tensor,
    tokens: Tensor,
    top: IntArray,
    named: Sequence[tuple[int, ...]],
    places: Tensor | None = None,
    machine: Machine | None = None,
) -> Looked:
    """Look up, for each row of `logits`, its token, its `top` likeliest and the ids `named`.

    With `places`, those rows of `logits` alone are meant.
    """
    most = min(int(top.max(initial=0)), logits.shape[1])
    look = _looked_at if machine is None else partial(_looked_at_by_kernels, machine)
    return Looked(*look(logits, tokens, top, most, named, places), top, named)


_Look = tuple[Tensor, Tensor, Tensor, Tensor]
"""See `Looked`."""


def _looked_at(
    logits: Tensor,
    tokens: Tensor,
    _top: IntArray,
    most: int,
    named: Sequence[tuple[int, ...]],
    places: Tensor | None,
) -> _Look:
    logprobs = (logits if places is None else logits[places]).log_softmax(1)
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    best, ids = logprobs.topk(most, 1)
    rows, columns = all_on_device(
        logits.device,
        np.repeat(np.arange(len(named)), [len(each) for each in named]),
        np.array([id_ for each in named for id_ in each], np.int64),
    )
    return own, best, ids, logprobs[rows, columns]


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
    return own, best, ids, by_name

"""Holding rows to their grammars: masks before a draw, the drawn tokens after it.

Both happen in one forward, on the thread that runs it, so a row's matcher has always seen
the tokens of all forwards before: nothing has to be committed first.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drumline.contract.grammar import GrammarFaultError, Matcher

Indices = npt.NDArray[np.int64]


def mask(logits: Tensor, indices: Indices, matchers: Sequence[Matcher]) -> list[int]:
    """Leave the rows `indices` of `logits` what their matchers allow; return whose failed.

    `logits` is `[rows, vocab]`. A matcher whose grammar ended allows everything: its
    request is over, and what is drawn for it is nobody's.
    """
    vocab = logits.shape[1]
    words = np.empty((vocab + 31) // 32, np.int32)
    faults = []
    for index, matcher in zip(map(int, indices), matchers, strict=True):
        if matcher.terminated:
            continue
        try:
            matcher.fill(words)
        except GrammarFaultError:
            faults.append(index)
            continue
        bits = np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little")
        _keep(logits[index], bits.view(np.bool_))
    return faults


def _keep(row: Tensor, allowed: npt.NDArray[np.bool_]) -> None:
    """Leave a row, `[vocab]`, what is allowed, by touching the fewer ids of the two kinds."""
    if 2 * np.count_nonzero(allowed) < len(allowed):
        ids = torch.from_numpy(np.flatnonzero(allowed)).to(row.device)
        kept = row[ids]
        row.fill_(-torch.inf)
        row[ids] = kept
    else:
        ids = torch.from_numpy(np.flatnonzero(~allowed)).to(row.device)
        row.index_fill_(0, ids, -torch.inf)


def advance(
    tokens: Tensor, bad: Tensor, indices: Indices, matchers: Sequence[Matcher]
) -> list[int]:
    """Tell the matchers of the rows `indices` their tokens; return whose did not fit.

    Rows that are `bad` have none.
    """
    drawn, void = tokens.tolist(), bad.tolist()
    return [
        index
        for index, matcher in zip(indices.tolist(), matchers, strict=True)
        if not (void[index] or matcher.terminated or matcher.accept(drawn[index]))
    ]

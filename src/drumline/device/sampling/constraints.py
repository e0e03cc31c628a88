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
    words = np.full((len(indices), (vocab + 31) // 32), -1, np.int32)
    faults = []
    for place, matcher in enumerate(matchers):
        if matcher.terminated:
            continue
        try:
            matcher.fill(words[place])
        except GrammarFaultError:
            words[place] = -1
            faults.append(int(indices[place]))
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab, bitorder="little")
    rows = torch.from_numpy(indices).to(logits.device)
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
    return faults


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

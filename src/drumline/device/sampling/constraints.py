"""Holding rows to their grammars: masks before a draw, the drawn tokens after it.

Both happen in one forward, on the thread that runs it, so a row's matcher has always seen
the tokens of all forwards before: nothing has to be committed first.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from drumline.contract.arrays import IntArray
from drumline.contract.grammar import GrammarFaultError, Matcher
from drumline.device.staging import Download, all_on_device, on_device

Indices = npt.NDArray[np.int64]

HANDFUL = 256
"""Ids of which a row is drawn by itself, without the other ids of the vocabulary."""
_NAMED = 2048
"""A row of which a mask forbids at most so many ids is touched id by id."""
_BITS = 32


class Handful(Struct, frozen=True, eq=False):
    """The rows of a batch to which their grammars leave a handful of ids.

    They are always `HANDFUL` wide, whatever else is in the batch: what a row draws may not
    depend on others, in its last bit neither. Unused places have a logit of -inf.
    """

    rows: Indices
    ids: Tensor
    """`[rows, HANDFUL]`, int64, ascending."""
    logits: Tensor
    """`[rows, HANDFUL]`"""


def mask(
    logits: Tensor, indices: Indices, matchers: Sequence[Matcher]
) -> tuple[Handful, list[int]]:
    """Leave the rows `indices` of `logits` what their matchers allow; return whose failed.

    A row to which its matcher leaves nothing is a handful without any.
    `logits` is `[rows, vocab]`; rows of a handful are not changed there. A matcher whose
    grammar ended allows everything: its request is over, and what is drawn for it is nobody's.
    """
    words = np.empty((len(matchers), -(-logits.shape[1] // _BITS)), np.int32)
    rows: list[int] = []
    faults: list[int] = []
    for index, matcher in zip(map(int, indices), matchers, strict=True):
        if matcher.terminated:
            continue
        try:
            matcher.fill(words, len(rows))
        except GrammarFaultError:
            faults.append(index)
        else:
            rows.append(index)
    return keep(logits, np.array(rows, np.int64), words[: len(rows)]), faults


def keep(logits: Tensor, rows: Indices, words: IntArray) -> Handful:
    """Leave `rows` of `logits` the ids whose bits are set in `words`, `[len(rows), words]`.

    Returns the rows of a handful, which are left as they are.
    In most places a grammar allows a handful of ids, or all but some hundred: then only
    those are looked at, which the packed bits find for all rows together.
    """
    vocab = logits.shape[1]
    if vocab % _BITS:
        # Bits behind the vocabulary mean nothing.
        words[:, -1] &= (1 << vocab % _BITS) - 1
    allowed = np.bitwise_count(words.view(np.uint32)).sum(1, dtype=np.int64)
    few = np.flatnonzero(allowed <= HANDFUL)
    others = allowed > HANDFUL
    many = np.flatnonzero(others & (vocab - allowed <= _NAMED))
    forbidden = ~words[many]
    if vocab % _BITS:
        forbidden[:, -1] &= (1 << vocab % _BITS) - 1
    places = _places(forbidden, rows[many] * vocab, vocab - allowed[many])
    logits.view(-1).index_fill_(0, on_device(logits.device, places), -torch.inf)
    wide = np.flatnonzero(others & (vocab - allowed > _NAMED))
    if logits.device.type == "cpu":
        _add(logits, rows[wide], words[wide])
    elif len(wide):
        _fill(logits, rows[wide], words[wide])
    return _handful(logits, rows[few], words[few], allowed[few])


def _add(logits: Tensor, rows: Indices, words: IntArray) -> None:
    """Hide what the bits of each row forbid, on a CPU.

    Adding costs the same whatever the bits are; choosing by a mask branches at each id.
    """
    vocab = logits.shape[1]
    for row, own in zip(map(int, rows), words, strict=True):
        added = _ADDED[own.view(np.uint8)].reshape(-1)[:vocab]
        logits[row].add_(torch.from_numpy(added))


def _fill(logits: Tensor, rows: Indices, words: IntArray) -> None:
    """Hide what the bits of each row forbid, where bits are unpacked at no cost but their way."""
    index, packed = all_on_device(logits.device, rows, words)
    shifts = torch.arange(_BITS, dtype=torch.int32, device=logits.device)
    bits = (packed.unsqueeze(2) >> shifts) & 1
    forbidden = bits.view(len(rows), -1)[:, : logits.shape[1]] == 0
    logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)


def _handful(logits: Tensor, rows: Indices, words: IntArray, counts: Indices) -> Handful:
    starts = rows * logits.shape[1]
    places = _places(words, starts, counts)
    begins = np.cumsum(counts) - counts
    # Where each stands in `[rows, HANDFUL]`.
    at = np.arange(len(places)) + np.repeat(np.arange(len(rows)) * HANDFUL - begins, counts)
    ids = np.zeros((len(rows), HANDFUL), np.int64)
    ids.reshape(-1)[at] = places - np.repeat(starts, counts)
    values = logits.new_full((len(rows), HANDFUL), -torch.inf)
    into, out_of, named = all_on_device(logits.device, at, places, ids)
    values.view(-1)[into] = logits.view(-1).take(out_of)
    return Handful(rows, named, values)


def _places(words: IntArray, starts: Indices, counts: Indices) -> Indices:
    """Return, row by row, its start plus the number of each bit that is set in it.

    `words` is `[rows, words]`; `counts` says how many bits of each row are set.
    """
    flat = words.reshape(-1)
    # As booleans these are searched several times faster than as numbers.
    filled = np.flatnonzero(flat != 0)
    bits = np.unpackbits(flat[filled].view(np.uint8), bitorder="little")
    each = np.flatnonzero(bits.view(np.bool_))
    places: Indices = (filled * _BITS)[each >> 5] + (each & 31)
    own = np.arange(len(words)) * (words.shape[1] * _BITS)
    places += np.repeat(starts - own, counts)
    return places


_ADDED = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    np.float32(-np.inf),
)
"""What each byte of a mask adds to the logits of its eight ids."""


def advance(
    tokens: Tensor, bad: Tensor, indices: Indices, matchers: Sequence[Matcher]
) -> list[int]:
    """Tell the matchers of the rows `indices` their tokens; return whose did not fit.

    Rows that are `bad` have none. Waits for the device: the matchers are to have seen these
    tokens before the next forward's masks are made.
    """
    drawn, void = (each.tolist() for each in Download([tokens, bad], tokens.device).wait())
    return [
        index
        for index, matcher in zip(indices.tolist(), matchers, strict=True)
        if not (void[index] or matcher.terminated or matcher.accept(drawn[index]))
    ]

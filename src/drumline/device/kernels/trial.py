"""A trial of kernels before they are trusted: small cases, done again in plain numpy."""

import ctypes
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from drumline.device.kernels.native import (
    BFLOAT16,
    BFLOATS,
    BYTES,
    FLOAT32,
    FLOATS,
    HALVES,
    INT8,
    NIBBLES,
    OFFSET_BYTES,
    Batch,
    Cache,
    Heads,
    Kernels,
    Machine,
    Matrix,
    Rows,
    Ways,
)

_BLOCK = 32
_PAGE = 16
_BLOCK_BYTES = {NIBBLES: 20, BYTES: 34, OFFSET_BYTES: 36}
"""Of what is packed as each kind: the first two are GGUF's Q4_1 and Q8_0."""
_CLOSE = 1e-4
_CLOSE_TO = {FLOAT32: 1e-4, BFLOAT16: 2e-2, INT8: 4e-4}
"""Queries meet integers as ones of 14 bits, and bfloat16, on some processors, as such."""


def tried(kernels: Kernels) -> str | None:
    """Return what `kernels` get wrong, if anything."""
    machine = Machine(kernels, 2)
    for kind, what in ((NIBBLES, "4-bit"), (BYTES, "8-bit"), (OFFSET_BYTES, "offset 8-bit")):
        if not _packed_holds(kernels, machine, kind):
            return f"a product of {what} weights came out wrong"
    for kind, what in ((FLOATS, "float32"), (BFLOATS, "bfloat16"), (HALVES, "float16")):
        if not _floats_hold(machine, kind):
            return f"a product of {what} weights came out wrong"
    for kind, what in ((FLOAT32, "float32"), (BFLOAT16, "bfloat16"), (INT8, "int8")):
        if not _attention_holds(machine, kind):
            return f"attention to {what} came out wrong"
    return None if _draws_hold(machine) else "tokens were drawn as they should not be"


def _packed_holds(kernels: Kernels, machine: Machine, kind: int) -> bool:
    random = np.random.default_rng(kind)
    rows, columns, tokens = 40, 96, 7
    size = _BLOCK_BYTES[kind]
    blocks = columns // _BLOCK
    stored = random.integers(0, 256, (rows, blocks, size), np.uint8)
    floats = 1 if kind == BYTES else 2
    stored[:, :, : 2 * floats] = (
        random.standard_normal((rows, blocks, floats)).astype(np.float16).view(np.uint8)
    )
    scale = stored[:, :, :2].copy().view(np.float16).astype(np.float64)
    minimum = np.zeros_like(scale)
    if floats == 2:  # noqa: PLR2004 - a scale and a minimum
        minimum = stored[:, :, 2:4].copy().view(np.float16).astype(np.float64)
    packed = stored[:, :, 2 * floats :]
    if kind == NIBBLES:
        integers = np.concatenate((packed & 15, packed >> 4), 2).astype(np.float64)
    else:
        integers = packed.view(np.int8).astype(np.float64)
    weight = (integers * scale + minimum).reshape(rows, columns)

    matrix = Matrix(None, None, rows, columns, kind, 0)
    memory = np.zeros(kernels.call("packed_bytes", ctypes.byref(matrix)), np.uint8)
    matrix.data = memory.ctypes.data
    offsets = np.arange(rows, dtype=np.int64) * blocks * size
    kernels.call(
        "pack",
        memory.ctypes.data,
        ctypes.byref(matrix),
        0,
        rows,
        stored.ctypes.data,
        offsets.ctypes.data,
        size,
        0,
    )
    x = random.standard_normal((tokens, columns)).astype(np.float32)
    cut = x.reshape(tokens, blocks, _BLOCK).astype(np.float64)
    step = np.abs(cut).max(2, keepdims=True) / 127
    expected = (np.rint(cut / step) * step).reshape(tokens, columns) @ weight.T
    return _multiplies(machine, matrix, x, expected)


def _floats_hold(machine: Machine, kind: int) -> bool:
    random = np.random.default_rng(kind)
    # More inputs than are summed at a time, and neither whole steps of them nor whole groups.
    rows, columns, tokens = 46, 3112, 7
    weight, x = (_short(random.standard_normal((n, columns))) for n in (rows, tokens))
    stored = weight
    if kind == BFLOATS:
        stored = (weight.view(np.uint32) >> 16).astype(np.uint16)
    elif kind == HALVES:
        stored = weight.astype(np.float16)
    matrix = Matrix(stored.ctypes.data, None, rows, columns, kind, 0)
    return _multiplies(machine, matrix, x, x.astype(np.float64) @ weight.astype(np.float64).T)


def _short(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return values near those given that every kind of float holds as they are."""
    return (np.rint(values * 32) / 32).astype(np.float32)


def _multiplies(
    machine: Machine, matrix: Matrix, x: npt.NDArray[np.float32], expected: npt.NDArray[np.float64]
) -> bool:
    """Whether rows come to what is expected, and to the same bits each alone."""
    made = np.empty(expected.shape, np.float32)
    machine.run("linear", ctypes.byref(matrix), x.ctypes.data, len(x), made.ctypes.data)
    alone = np.empty_like(made)
    for i in range(len(x)):
        machine.run("linear", ctypes.byref(matrix), x[i:].ctypes.data, 1, alone[i:].ctypes.data)
    # A value right between two integers may go to either.
    near = bool(np.allclose(made, expected, rtol=0, atol=_CLOSE * float(np.abs(expected).max())))
    return near and bool((made == alone).all())


def _attention_holds(machine: Machine, kind: int) -> bool:
    """Feed two rows, then a chunk of one and a token of the other, and see what those read."""
    random = np.random.default_rng(5)
    fed, chunks = np.array([2, 300], np.int32), np.array([3, 1], np.int32)
    heads, kv_heads, size, columns = 6, 2, 80, 19
    blocks = np.arange(2 * columns, dtype=np.int64).reshape(2, columns)[::-1].copy()
    # A float32 for each value, and one for a step, is more than any kind takes.
    pool = np.zeros((2, 2 * columns * _PAGE * kv_heads * (size + 1)), np.float32)
    cache = Cache(pool[0].ctypes.data, pool[1].ctypes.data, 0)
    told = Heads(heads, kv_heads, size, _PAGE, kind, 0)
    known = [random.standard_normal((2, count, kv_heads, size)) for count in fed + chunks]
    known = [each.astype(np.float32) for each in known]
    for prefixes, lengths in ((np.zeros_like(fed), fed), (fed, chunks)):
        spans = [slice(p, p + n) for p, n in zip(prefixes, lengths, strict=True)]
        row = np.repeat(np.arange(2), lengths)
        positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        positions = positions.astype(np.int64)
        slots = blocks[row, positions // _PAGE] * _PAGE + positions % _PAGE
        starts = (np.cumsum(lengths) - lengths).astype(np.int32)
        fresh = np.concatenate([r[:, s] for r, s in zip(known, spans, strict=True)], 1).copy()
        query = random.standard_normal((len(row), heads, size)).astype(np.float32)
        out = np.empty_like(query)
        batch = Batch(
            len(row),
            *blocks.shape,
            None,
            *(each.ctypes.data for each in (positions, slots, blocks, starts, lengths, prefixes)),
        )
        machine.run(
            "attention",
            ctypes.byref(told),
            ctypes.byref(cache),
            ctypes.byref(batch),
            query.ctypes.data,
            fresh[0].ctypes.data,
            fresh[1].ctypes.data,
            out.ctypes.data,
        )
    kept = [_kept(each.astype(np.float64), kind) for each in known]
    for token, position in enumerate(positions):
        for head in range(heads):
            key, value = kept[row[token]][:, : position + 1, head // (heads // kv_heads)]
            score = key @ query[token, head] / np.sqrt(size)
            weight = np.exp(score - score.max())
            expected = weight @ value / weight.sum()
            if not np.allclose(out[token, head], expected, rtol=0, atol=_CLOSE_TO[kind]):
                return False
    return True


def _kept(vectors: npt.NDArray[np.float64], kind: int) -> npt.NDArray[np.float64]:
    """Return vectors as a pool keeps them."""
    if kind == FLOAT32:
        return vectors
    kept: npt.NDArray[np.float64]
    if kind == BFLOAT16:
        bits = vectors.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        kept = rounded.view(np.float32).astype(np.float64)
        return kept
    step = np.abs(vectors).max(-1, keepdims=True) / 127
    kept = np.rint(vectors / step) * step
    return kept


_GOLDEN, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


def _draws_hold(machine: Machine) -> bool:
    """Rows that take the largest, draw from all, and from the likeliest few, in a batch."""
    random = np.random.default_rng(9)
    vocab, few, seed = 401, 7, 11
    logits = (2 * random.standard_normal((3, vocab))).astype(np.float32)
    greedy = np.array([1, 0, 0], np.bool_)
    top_k = np.array([vocab, vocab, few], np.int32)
    ones, zeros, seeds = (
        np.ones(3, np.float32),
        np.zeros(3, np.float32),
        np.full(3, seed, np.uint64),
    )
    ways = Ways(
        greedy.ctypes.data,
        ones.ctypes.data,
        top_k.ctypes.data,
        ones.ctypes.data,
        zeros.ctypes.data,
        ones.ctypes.data,
        seeds.ctypes.data,
    )
    places, positions = np.arange(3), np.arange(3, dtype=np.int32)
    rows = Rows(
        logits.ctypes.data,
        3,
        vocab,
        places.ctypes.data,
        positions.ctypes.data,
        positions.ctypes.data,
        None,
    )
    tokens, best = np.empty(3, np.int64), np.empty(3, np.float32)
    machine.run(
        "draw", ctypes.byref(rows), ctypes.byref(ways), tokens.ctypes.data, best.ctypes.data
    )
    exact = logits.astype(np.float64)
    masses = [np.exp(exact[1, i : i + 256]).sum() for i in range(0, vocab, 256)]
    first = 256 * _drawn(np.log(masses), seed, 1, range(-1, -3, -1))
    stretch = exact[1, first : first + 256]
    expected = [
        int(exact[0].argmax()),
        first + _drawn(stretch, seed, 1, range(first, first + len(stretch))),
    ]
    likeliest = np.argsort(-exact[2])[:few]
    expected.append(int(likeliest[_drawn(exact[2, likeliest], seed, 2, likeliest.tolist())]))
    return tokens.tolist() == expected and bool((best == logits.max(1)).all())


def _drawn(values: npt.NDArray[np.float64], seed: int, position: int, ids: Iterable[int]) -> int:
    """Return which of the log weights is the largest with its noise on top."""
    key = _mixed(_mixed(seed) ^ position * _GOLDEN & _WORD)
    uniform = [((_mixed(key ^ id_ * _GOLDEN & _WORD) >> 12) + 0.5) * 2.0**-52 for id_ in ids]
    return int((values - np.log(-np.log(uniform))).argmax())


def _mixed(state: int) -> int:
    state = state + _GOLDEN & _WORD
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _WORD
    return state ^ state >> 31

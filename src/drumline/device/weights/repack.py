"""Quantized blocks of any GGUF format as the blocks of 32 that kernels multiply by.

A kernel's block has one float16 scale and maybe a minimum, so what becomes of a format is
one of three things. Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 have the same: nothing is lost. Q4_K and
Q5_K have products of a float16 and a 6-bit integer, which are rounded to float16: by 2^-11 of
each at most, and by nothing below 2^-13, where float16 holds every multiple of its smallest
number. Q2_K, Q3_K and Q6_K have a scale for every 16 values: they are rounded again to 8 bits, by
at most half of a 127th of the block's largest value (and 2^-24).

It knows bytes and shapes only, neither files nor models.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.core.gguf_file import BLOCKS, TensorType
from drumline.device.kernels.native import BYTES, NIBBLES, OFFSET_BYTES
from drumline.device.weights.dequantize import decoded
from drumline.device.weights.source import StoredBlocks

_OWN = {
    TensorType.Q4_0: NIBBLES,
    TensorType.Q4_1: NIBBLES,
    TensorType.Q4_K: NIBBLES,
    TensorType.Q5_1: OFFSET_BYTES,
    TensorType.Q5_K: OFFSET_BYTES,
    TensorType.Q5_0: BYTES,
    TensorType.Q8_0: BYTES,
    TensorType.Q2_K: BYTES,
    TensorType.Q3_K: BYTES,
    TensorType.Q6_K: BYTES,
}
"""The smallest kind of packed weights that holds what each type does."""
_ROUNDED_AGAIN = frozenset({TensorType.Q2_K, TensorType.Q3_K, TensorType.Q6_K})
_AS_STORED = frozenset({(TensorType.Q4_0, NIBBLES), (TensorType.Q4_1, NIBBLES)}) | {
    (TensorType.Q8_0, BYTES)
}
_NAMES = {NIBBLES: "4 bits", BYTES: "8 bits", OFFSET_BYTES: "8 bits above a minimum"}
_BLOCK = 32
_PIECE_VALUES = 1 << 18
_MOST = 127


def packs(kind: TensorType) -> bool:
    """Whether weights of a type can stay small integers."""
    return kind in _OWN


def kind_of(types: Iterable[TensorType]) -> int:
    """Return the smallest kind of packed weights that rows of all the types can be."""
    kinds = {_OWN[each] for each in types}
    return kinds.pop() if len(kinds) == 1 else OFFSET_BYTES


def as_stored(type_: TensorType, kind: int) -> bool:
    """Whether kernels pack blocks of a type as that kind from where they are stored."""
    return (type_, kind) in _AS_STORED


def described(type_: TensorType, kind: int) -> str:
    """Say what becomes of a type as a kind of packed weights."""
    again = ", rounded again" if type_ in _ROUNDED_AGAIN else ""
    return f"{type_.name} as {_NAMES[kind]}{again}"


def repacked(part: StoredBlocks, kind: int) -> Iterator[Tensor]:
    """Yield the rows of a part, some at a time, as blocks of a kind: `[rows, blocks, bytes]`.

    A block is its float16 scale, its minimum where the kind has one, and 32 integers. Raises
    ConfigError where float16 ends below a scale or minimum.
    """
    values, size = BLOCKS[part.kind]
    blocks = -(-(part.skipped + part.columns) // values)
    windows = sliding_window_view(np.asarray(part.data), blocks * size)
    kept = slice(part.skipped // _BLOCK, (part.skipped + part.columns) // _BLOCK)
    # In pieces that stay in the processor's cache.
    step = max(1, _PIECE_VALUES // (blocks * values))
    for start in range(0, len(part.offsets), step):
        rows = torch.from_numpy(windows[part.offsets[start : start + step]])
        made = _blocks(rows.view(-1, size), part.kind, kind)
        yield made.view(len(rows), -1, made.shape[1])[:, kept].contiguous()


def _blocks(stored: Tensor, type_: TensorType, kind: int) -> Tensor:
    """Return stored blocks, `[blocks, bytes]` of a type, as ones of a kind."""
    integers, scale, minimum = decoded(stored, type_)
    if type_ in _ROUNDED_AGAIN:
        values = integers * scale
        if minimum is not None:
            values += minimum
        integers, scale = _rounded(values.view(-1, _BLOCK))
        minimum = None
    floats = [scale.reshape(-1, 1).half()]
    if kind != BYTES:
        least = torch.zeros_like(scale) if minimum is None else minimum
        floats.append(least.reshape(-1, 1).half())
    if any(bool(each.isinf().any()) for each in floats):
        raise ConfigError(
            "--quantization",
            f"blocks of {type_.name} have a scale or minimum that float16 does not hold, so "
            "they cannot stay small integers; start with --quantization none",
        )
    integers = integers.view(torch.uint8).view(-1, _BLOCK)
    if kind == NIBBLES:
        low, high = integers.view(torch.int64).chunk(2, 1)
        integers = (low | (high << 4)).view(torch.uint8)
    return torch.cat([*(each.view(torch.uint8) for each in floats), integers], 1)


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks of floats, `[blocks, 32]`, as integers of 8 bits and their scales."""
    # Rounded up to float16, so that no integer comes out above what 8 bits hold.
    scale = values.abs().amax(1, keepdim=True) * ((1 + 2**-11) / _MOST) + 2**-25
    scale = scale.half().float()
    steps = values * torch.where(scale > 0, 1 / scale, 0)
    return steps.round_().to(torch.int8), scale

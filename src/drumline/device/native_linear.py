"""Linear layers by native kernels: of floats as they lie, and of small integers.

What a row comes to has the same bits whatever stands beside it. Small integers meet inputs
that are rounded to 8 bits in blocks of 32. Nothing here knows a model.

Thread: forward thread only.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from drumline.core.gguf_file import BLOCKS, TensorType
from drumline.device.kernels.native import BFLOATS, FLOATS, HALVES, Machine, Matrix
from drumline.device.weights.repack import as_stored, kind_of, repacked
from drumline.device.weights.source import Cut, StoredBlocks
from drumline.device.weights.store import WeightStore

_FLOATS = {torch.float32: FLOATS, torch.bfloat16: BFLOATS, torch.float16: HALVES}


class NativeLinear:
    """A linear layer whose inputs and outputs are float32."""

    __slots__ = ("_keep", "machine", "matrix")

    def __init__(self, machine: Machine, matrix: Matrix, *keep: Tensor | None) -> None:
        """Compute `matrix`, whose memory is that of `keep`."""
        self.machine = machine
        self.matrix = matrix
        """What kernels are told of it."""
        self._keep = keep

    def rows(self, first: int, count: int) -> Tensor:
        """Return the weights of `count` outputs from `first` on as floats, `[count, inputs]`."""
        return NativeEmbedding(self)(torch.arange(first, first + count))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty((len(x), self.matrix.rows))
        matrix = ctypes.byref(self.matrix)
        self.machine.run("linear", matrix, x.data_ptr(), len(x), out.data_ptr())
        return out


class PackedRows(Struct, frozen=True, eq=False):
    """A weight, or the part of it that this rank holds, among a layer's outputs."""

    layer: NativeLinear
    start: int
    count: int
    cut: Cut | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole weight."""
        own = self.count, int(self.layer.matrix.columns)
        return own if self.cut is None else self.cut.stored(own)

    def first(self, rows: int) -> Tensor:
        """Return the first of this rank's rows as float32, `rows` at most."""
        return self.layer.rows(self.start, min(rows, self.count))


class NativeEmbedding:
    """The vectors of token ids, float32, however they are kept."""

    __slots__ = ("_linear",)

    def __init__(self, linear: NativeLinear) -> None:
        """Read the rows of `linear`, whose outputs are a vocabulary's entries."""
        self._linear = linear

    def __call__(self, ids: Tensor) -> Tensor:
        matrix = self._linear.matrix
        ids = ids.contiguous()
        out = torch.empty((len(ids), matrix.columns))
        told = ctypes.byref(matrix)
        self._linear.machine.kernels.run("rows", told, ids.data_ptr(), len(ids), out.data_ptr())
        return out


def of_floats(
    machine: Machine, weight: Tensor, bias: Tensor | None, *, paired: bool = False
) -> NativeLinear:
    """Return a layer of `weight`, `[out, in]`, which is read where it lies; the bias is float32.

    Inputs are a multiple of 8.
    `paired` computes the outputs' first half beside the second, as a gated block wants them.
    """
    rows, columns = weight.shape
    kind = _FLOATS[weight.dtype]
    matrix = Matrix(weight.data_ptr(), _address(bias), rows, columns, kind, int(paired))
    return NativeLinear(machine, matrix, weight, bias)


def packed_bytes(machine: Machine, parts: Sequence[StoredBlocks]) -> int:
    """Return the memory that a layer of the parts takes, one below the other."""
    return _packed_bytes(machine, _shape(parts))


def of_blocks(
    machine: Machine,
    parts: Sequence[StoredBlocks],
    bias: Tensor | None,
    store: WeightStore,
    *,
    paired: bool = False,
) -> NativeLinear:
    """Return a layer of the parts, one below the other, packed into memory of `store`.

    All have the same columns. `paired` lays the outputs' first half beside the second, as a gated
    block wants them. Raises ConfigError where blocks cannot be packed.
    """
    matrix = _shape(parts, paired=paired)
    memory = store.raw(_packed_bytes(machine, matrix))
    matrix.data, matrix.bias = memory.data_ptr(), _address(bias)
    first = 0
    for part in parts:
        if as_stored(part.kind, matrix.kind):
            size, centred = BLOCKS[part.kind][1], part.kind is TensorType.Q4_0
            at = part.data.ctypes.data
            first = _pack(machine, matrix, first, at, part.offsets, size, centred=centred)
            continue
        for rows in repacked(part, matrix.kind):
            offsets = np.arange(len(rows), dtype=np.int64) * rows[0].nbytes
            first = _pack(machine, matrix, first, rows.data_ptr(), offsets, rows.shape[2])
    return NativeLinear(machine, matrix, memory, bias)


def _shape(parts: Sequence[StoredBlocks], *, paired: bool = False) -> Matrix:
    """Return the matrix of the parts, without memory."""
    rows = sum(len(part.offsets) for part in parts)
    kind = kind_of(part.kind for part in parts)
    return Matrix(None, None, rows, parts[0].columns, kind, int(paired))


def _packed_bytes(machine: Machine, matrix: Matrix) -> int:
    size: int = machine.kernels.call("packed_bytes", ctypes.byref(matrix))
    return size


def _pack(
    machine: Machine,
    matrix: Matrix,
    first: int,
    data: int,
    offsets: NDArray[np.int64],
    size: int,
    *,
    centred: bool = False,
) -> int:
    """Pack rows of blocks of `size` bytes, whose offsets count from the address `data`.

    They are the outputs from `first` on; returned is the next one.
    """
    machine.kernels.call(
        "pack",
        matrix.data,
        ctypes.byref(matrix),
        first,
        len(offsets),
        data,
        offsets.ctypes.data,
        size,
        int(centred),
    )
    return first + len(offsets)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

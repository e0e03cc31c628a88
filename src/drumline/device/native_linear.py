"""Linear layers by native kernels: of floats as they lie, and of small integers as stored.

What a row comes to has the same bits whatever stands beside it. Small integers meet inputs
that are rounded to 8 bits in blocks of 32. Nothing here knows a model.

Thread: forward thread only.
"""

import ctypes
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from drumline.core.gguf_file import BLOCKS, TensorType
from drumline.device.kernels.native import (
    BFLOATS,
    BYTES,
    FLOATS,
    HALVES,
    NIBBLES,
    Machine,
    Matrix,
)
from drumline.device.weights.source import Cut, StoredBlocks
from drumline.device.weights.store import WeightStore

_STORED = {TensorType.Q4_0: NIBBLES, TensorType.Q4_1: NIBBLES, TensorType.Q8_0: BYTES}
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


def packable(parts: Sequence[StoredBlocks]) -> bool:
    """Whether the parts can be one matrix: all of 4 bits or all of 8, with inputs in common."""
    return len({(_STORED[part.kind], part.columns) for part in parts}) == 1


def of_blocks(
    machine: Machine,
    parts: Sequence[StoredBlocks],
    bias: Tensor | None,
    store: WeightStore,
    *,
    paired: bool = False,
) -> NativeLinear:
    """Return a layer of the parts, one below the other, packed into memory of `store`.

    `paired` lays the outputs' first half beside the second, as a gated block wants them.
    """
    kernels = machine.kernels
    rows = sum(len(part.offsets) for part in parts)
    kind, columns = _STORED[parts[0].kind], parts[0].columns
    matrix = Matrix(None, _address(bias), rows, columns, kind, int(paired))
    memory = store.raw(kernels.call("packed_bytes", ctypes.byref(matrix)))
    matrix.data = memory.data_ptr()
    first = 0
    for part in parts:
        kernels.call(
            "pack",
            memory.data_ptr(),
            ctypes.byref(matrix),
            first,
            len(part.offsets),
            part.data.ctypes.data,
            part.offsets.ctypes.data,
            BLOCKS[part.kind][1],
            int(part.kind),
        )
        first += len(part.offsets)
    return NativeLinear(machine, matrix, memory, bias)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

"""Layers whose weights stay small integers, as their checkpoint stores them.

Inputs are rounded to 8 bits in blocks of 32 and multiplied by native kernels: what a row
comes to has the same bits whatever stands beside it. Nothing here knows a model.

Thread: forward thread only.
"""

import ctypes
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from drumline.core.gguf_file import BLOCKS, TensorType
from drumline.device.kernels.native import BYTES, NIBBLES, Machine, Matrix
from drumline.device.weights.source import Cut, StoredBlocks
from drumline.device.weights.store import WeightStore

GROUP = 32
"""Outputs that are packed together."""
_KINDS = {TensorType.Q4_0: NIBBLES, TensorType.Q4_1: NIBBLES, TensorType.Q8_0: BYTES}


def packable(parts: Sequence[StoredBlocks]) -> bool:
    """Whether the parts can be one matrix: all of 4 bits or all of 8, with inputs in common."""
    return len({(_KINDS[part.kind], part.columns) for part in parts}) == 1


class PackedLinear:
    """A linear layer of packed weights."""

    __slots__ = ("_keep", "machine", "matrix")

    def __init__(
        self,
        machine: Machine,
        parts: Sequence[StoredBlocks],
        bias: Tensor | None,
        store: WeightStore,
        *,
        paired: bool = False,
    ) -> None:
        """Pack the parts, one below the other, into memory of `store`.

        `paired` lays the outputs' first half beside the second, as a gated block wants them.
        """
        kernels = machine.kernels
        kind, columns = _KINDS[parts[0].kind], parts[0].columns
        rows = sum(len(part.offsets) for part in parts)
        memory = store.raw(kernels.call("packed_bytes", rows, columns, kind))
        self.machine = machine
        self._keep = (memory, bias)
        self.matrix = Matrix(
            memory.data_ptr(),
            None if bias is None else bias.data_ptr(),
            rows,
            columns,
            kind,
            int(paired),
        )
        """What kernels are told of it."""
        first = 0
        for part in parts:
            kernels.call(
                "pack",
                memory.data_ptr(),
                ctypes.byref(self.matrix),
                first,
                len(part.offsets),
                part.data.ctypes.data,
                part.offsets.ctypes.data,
                BLOCKS[part.kind][1],
                int(part.kind),
            )
            first += len(part.offsets)

    def unpacked(self, first: int, count: int) -> Tensor:
        """Return the weights of `count` outputs from `first` on as floats, `[count, inputs]`."""
        rows = torch.arange(first, first + count)
        if self.matrix.paired:
            # Groups of the first half alternate with those of the second.
            half = self.matrix.rows // 2
            rows = (rows % half // GROUP * 2 + rows // half) * GROUP + rows % GROUP
        return PackedEmbedding(self)(rows)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty((len(x), self.matrix.rows))
        matrix = ctypes.byref(self.matrix)
        self.machine.run("linear", matrix, x.data_ptr(), len(x), out.data_ptr())
        return out


class PackedRows(Struct, frozen=True, eq=False):
    """A weight, or the part of it that this rank holds, among a layer's outputs."""

    layer: PackedLinear
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
        return self.layer.unpacked(self.start, min(rows, self.count))


class PackedEmbedding:
    """The vectors of token ids, unpacked as they are asked for."""

    __slots__ = ("_packed",)

    def __init__(self, packed: PackedLinear) -> None:
        """Read the rows of `packed`, whose outputs are a vocabulary's entries."""
        self._packed = packed

    def __call__(self, ids: Tensor) -> Tensor:
        matrix = self._packed.matrix
        ids = ids.contiguous()
        out = torch.empty((len(ids), matrix.columns))
        told = ctypes.byref(matrix)
        self._packed.machine.kernels.call("rows", told, ids.data_ptr(), len(ids), out.data_ptr())
        return out

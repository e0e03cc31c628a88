"""Attention by native kernels, which take all rows of a batch in one call.

A token's context is read in stretches that begin at fixed positions, whatever chunk or batch
the token stands in: its result has the same bits in any.

Thread: forward thread only.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from drumline.core.errors import InvariantError
from drumline.device.attention import AttentionBatch
from drumline.device.kernels.native import (
    BFLOAT16,
    FLOAT32,
    INT8,
    MOST_HEAD_DIM,
    MOST_SHARED_HEADS,
    Batch,
    Cache,
    Heads,
    Machine,
)
from drumline.device.kv import KvPool

LANES = 8
POOLS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8}
"""What kernels read, where it lies in lines."""


def fits(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether kernels compute attention of such heads."""
    shared = heads // kv_heads
    return not head_dim % LANES and head_dim <= MOST_HEAD_DIM and shared <= MOST_SHARED_HEADS


class PlacedBatch:
    """A batch as kernels are told of it; it keeps what that points to."""

    __slots__ = ("_keep", "told")

    def __init__(self, batch: AttentionBatch, ids: Tensor | None = None) -> None:
        numbers = [
            np.ascontiguousarray(each, np.int32)
            for each in (batch.starts, batch.lengths, batch.prefixes)
        ]
        self._keep = (batch, ids, numbers)
        self.told = Batch(
            len(batch.positions),
            *batch.blocks.shape,
            None if ids is None else ids.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            batch.blocks.data_ptr(),
            *(each.ctypes.data for each in numbers),
        )


def cache_of(pool: KvPool, layer: int, window: int | None) -> Cache:
    """Return what kernels are told of a layer's part of the pool."""
    return Cache(*pool.addresses(layer), window or 0)


class NativeAttention:
    """The native back end. It computes in float32, whatever the pool holds."""

    __slots__ = ("_machine", "_placed", "pool")

    def __init__(self, pool: KvPool, machine: Machine) -> None:
        if not pool.form.lines:
            raise InvariantError("kernels read pools whose blocks lie in lines")
        self.pool = pool
        self._machine = machine
        self._placed: tuple[AttentionBatch, PlacedBatch] | None = None

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: AttentionBatch,
        window: int | None,
    ) -> Tensor:
        # The same for every layer of a forward.
        if self._placed is None or self._placed[0] is not batch:
            self._placed = batch, PlacedBatch(batch)
        heads = Heads(
            query.shape[1],
            key.shape[1],
            query.shape[2],
            self.pool.shape.rows,
            POOLS[self.pool.form.dtype],
            0,
        )
        inputs = [each.float().contiguous() for each in (query, key, value)]
        out = torch.empty_like(inputs[0])
        self._machine.run(
            "attention",
            ctypes.byref(heads),
            ctypes.byref(cache_of(self.pool, layer, window)),
            ctypes.byref(self._placed[1].told),
            *(each.data_ptr() for each in inputs),
            out.data_ptr(),
        )
        return out.to(query.dtype)

"""The memory that holds keys and values, in blocks, and the table of who has which.

It moves bytes where a plan says; it does not know why, nor what a token is.

Thread: forward thread only. That the table changes nowhere else is what makes a
later plan's edits invisible to a forward that is queued or running.
"""

import math

import numpy as np
import torch
from torch import Tensor

from drumline.contract.arrays import IntArray

BLOCK_TOKENS = 16
"""Tokens a block holds: the page of this device."""


class KvPool:
    """Keys and values of every layer, in blocks of `block_tokens` tokens.

    One tensor a layer and kind, `[blocks, block_tokens, kv_heads, head_dim]`: a
    block is contiguous, and a layer's kernel is handed that layer's memory alone.
    Block 0 is the null block: nobody owns it, and what is read from it is masked.
    """

    __slots__ = ("block_tokens", "keys", "values")

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (blocks, block_tokens, kv_heads, head_dim)
        self.block_tokens = block_tokens
        self.keys = [_blank(shape, dtype, device) for _ in range(layers)]
        self.values = [_blank(shape, dtype, device) for _ in range(layers)]

    def zero(self, blocks: IntArray) -> None:
        """Blank blocks for a new owner."""
        index = torch.from_numpy(blocks.astype(np.int64))
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, index, 0)

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy blocks onto others, as if all sources were read before any target is written."""
        source = torch.from_numpy(sources.astype(np.int64))
        target = torch.from_numpy(targets.astype(np.int64))
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, target, tensor.index_select(0, source))


def _blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zeroed memory, which costs nothing until it is touched.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


class BlockTable:
    """Which block holds a pool row's tokens: `[rows, columns]`, column `c` its `c`-th block.

    This is the data plane's own copy; only the patches of plans change it.
    """

    __slots__ = ("_table",)

    def __init__(self, rows: int, columns: int) -> None:
        self._table = np.zeros((rows, columns), np.int32)

    def patch(self, rows: IntArray, columns: IntArray, blocks: IntArray) -> None:
        """Set `table[rows[i], columns[i]] = blocks[i]`."""
        self._table[rows, columns] = blocks

    def blocks(self, row: int, count: int) -> IntArray:
        """Return the first `count` blocks of a row."""
        return self._table[row, :count]

    def gather(self, rows: IntArray, count: int) -> IntArray:
        """Return the first `count` blocks of each of `rows`, `[len(rows), count]`."""
        return self._table[rows, :count]

    def at(self, rows: IntArray, columns: IntArray) -> IntArray:
        """Return `table[rows[i], columns[i]]` for every `i`."""
        found: IntArray = self._table[rows, columns]
        return found

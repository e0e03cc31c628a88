"""The memory that holds keys and values, in blocks, and the table of who has which.

It moves bytes where a plan says; it does not know why, nor what a token is.

Thread: forward thread only. That the table changes nowhere else is what makes a
later plan's edits invisible to a forward that is queued or running.
"""

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from drumline.contract.arena import PageLayout
from drumline.contract.arrays import IntArray
from drumline.core.errors import ConfigError
from drumline.device.kv_form import KvForm, KvSide
from drumline.device.memory import Memory
from drumline.device.staging import all_on_device, on_device


class BlockShape(Struct, frozen=True):
    """How the places of tokens count: slot `b * rows + t` is token `t` of block `b`."""

    tokens: int
    """Tokens a block holds."""
    rows: int
    """Slots from a block to the next: its tokens in every layer, keys and values."""


class KvPool:
    """Keys and values of every layer, in blocks.

    A block is one piece of memory, layer by layer, the keys before the values: the way
    blocks lie in host memory too, so that one is moved by one copy, and so is a run of its
    layers. Whatever belongs to a token lies in its block, steps of integers included.
    Block 0 is the null block: nobody owns it, and what is read from it is masked.
    """

    __slots__ = (
        "_blocks",
        "_memory",
        "away",
        "bytes",
        "device",
        "form",
        "keys",
        "layout",
        "shape",
        "values",
    )

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        form: KvForm,
        device: torch.device,
    ) -> None:
        size = (block_tokens, kv_heads, head_dim)
        side_bytes = form.side_bytes(*size)
        self.away = False
        """Whether the memory was given back."""
        self.form = form
        self.layout = PageLayout(form.tag(*size), 2 * layers, side_bytes)
        self.device = device
        self._memory = Memory(blocks * self.layout.block_bytes, device)
        raw = self._memory.bytes.view(blocks, 2 * layers, side_bytes)
        # Wider than bytes, as what fills and copies them goes number by number.
        self._blocks = raw.view(blocks, -1).view(torch.int32)
        self.shape = BlockShape(block_tokens, 2 * layers * block_tokens)
        self.keys, self.values = (
            [
                KvSide(raw[:, field], form, *size, keys=side == 0)
                for field in range(side, 2 * layers, 2)
            ]
            for side in (0, 1)
        )
        self.bytes = raw
        """The same memory as blocks, uint8 `[blocks, fields, field_bytes]`: what is copied."""

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep tokens' keys and values, `[tokens, kv_heads, head_dim]`, at `slots` of `shape`."""
        blocks, tokens = slots // self.shape.rows, slots % self.shape.rows
        self.keys[layer].write(blocks, tokens, keys)
        self.values[layer].write(blocks, tokens, values)

    def addresses(self, layer: int) -> tuple[int, int]:
        """Return where a layer's keys and its values of block 0 begin."""
        start, side_bytes = self._memory.bytes.data_ptr(), self.layout.field_bytes
        return start + 2 * layer * side_bytes, start + (2 * layer + 1) * side_bytes

    @property
    def why_kept(self) -> str | None:
        """Why the memory cannot be given back, if so."""
        return self._memory.why_kept

    def give_back(self) -> None:
        """Return the memory to the system; no forward may run before `take_back`."""
        self._memory.give_back()
        self.away = True

    def take_back(self) -> None:
        """Take the memory again; every block is blank."""
        self._memory.take_back()
        self.away = False

    def zero(self, blocks: IntArray) -> None:
        """Blank blocks for a new owner."""
        self._blocks.index_fill_(0, on_device(self.device, blocks.astype(np.int64)), 0)

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy blocks onto others, as if all sources were read before any target is written."""
        source, target = all_on_device(
            self.device, sources.astype(np.int64), targets.astype(np.int64)
        )
        self._blocks.index_copy_(0, target, self._blocks.index_select(0, source))


class BlockTable:
    """Which block holds a pool row's tokens: `[rows, columns]`, column `c` its `c`-th block.

    This is the data plane's own copy; only the patches of plans change it.
    """

    __slots__ = ("_table", "columns")

    def __init__(self, rows: int, columns: int) -> None:
        """Make an empty table. Raises ConfigError when there is no memory for it."""
        self.columns = columns
        try:
            self._table = np.zeros((rows, columns), np.int32)
        except MemoryError as error:
            raise ConfigError(
                "--max-model-len", f"no memory for {rows} rows of {columns} blocks; lower it"
            ) from error

    def patch(self, rows: IntArray, columns: IntArray, blocks: IntArray) -> None:
        """Set `table[rows[i], columns[i]] = blocks[i]`."""
        self._table[rows, columns] = blocks

    def gather(self, rows: IntArray, count: int) -> IntArray:
        """Return the first `count` blocks of each of `rows`, `[len(rows), count]`."""
        return self._table[rows, :count]

    def at(self, rows: IntArray, columns: IntArray) -> IntArray:
        """Return `table[rows[i], columns[i]]` for every `i`."""
        found: IntArray = self._table[rows, columns]
        return found

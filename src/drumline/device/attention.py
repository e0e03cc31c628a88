"""Attention over paged keys and values, for one ragged batch.

It knows tokens' positions and the blocks they lie in; it does not know requests,
plans or which model asks.

Back ends implement `Attention`; `TorchAttention` is the reference, in plain
PyTorch for any device and float type.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from drumline.contract.arrays import IntArray
from drumline.device.history import ReadTokens
from drumline.device.kv import BlockShape, BlockTable, KvPool
from drumline.device.staging import all_on_device, on_device

_CPU = torch.device("cpu")


class AttentionBatch:
    """Where the tokens of one forward lie: what every layer's attention reads.

    Row `i` feeds `lengths[i]` tokens at positions `prefixes[i] …`. Tokens lie back
    to back in row order. All values are frozen once made: the block table may change
    as soon as the forward is done, this may not.
    """

    __slots__ = (
        "_blocks",
        "_decodes",
        "_page",
        "counts",
        "device",
        "held",
        "history",
        "lengths",
        "positions",
        "prefixes",
        "slots",
        "starts",
    )

    def __init__(
        self,
        table: BlockTable,
        rows: IntArray,
        lengths: IntArray,
        prefixes: IntArray,
        shape: BlockShape,
        device: torch.device = _CPU,
    ) -> None:
        page = shape.tokens
        starts = np.cumsum(lengths) - lengths
        token_row = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(len(token_row)) - starts[token_row] + prefixes[token_row]
        columns = positions // page
        held = table.at(rows[token_row], columns).astype(np.int64)
        self.history: ReadTokens | None = None
        """What a model that looks back on tokens may read."""
        self.lengths = lengths
        self.prefixes = prefixes
        self.starts = starts
        self.device = device
        self.counts = -(-(prefixes + lengths) // page)
        """How many blocks each row has read or written once the forward is done."""
        # What a row does not own it must not read: stale entries become the null block.
        blocks = table.gather(rows, int(self.counts.max())).astype(np.int64)
        blocks[np.arange(blocks.shape[1]) >= self.counts[:, None]] = 0
        self.held = blocks
        """The blocks of each row, null ones behind them, `[rows, blocks]`, on the host."""
        self.positions, self.slots = all_on_device(
            device, positions, held * shape.rows + positions % page
        )
        self._blocks: Tensor | None = None
        self._page = page
        self._decodes: list[_DecodeGroup] | None = None

    def take(self, other: "AttentionBatch") -> None:
        """Say what `other`, of as many tokens, says, by tensors that stay where they are."""
        self.lengths, self.prefixes, self.starts = other.lengths, other.prefixes, other.starts
        self.counts, self.held = other.counts, other.held
        self.positions.copy_(other.positions)
        self.slots.copy_(other.slots)
        self._blocks = self._decodes = None

    @property
    def blocks(self) -> Tensor:
        """What is `held`, on the device; not every back end reads it there."""
        if self._blocks is None:
            self._blocks = on_device(self.device, self.held)
        return self._blocks

    @property
    def decodes(self) -> "list[_DecodeGroup]":
        """The rows of one token each, in groups of like context."""
        if self._decodes is None:
            self._decodes = _decode_groups(self, self._page)
        return self._decodes


class _DecodeGroup:
    """Rows of one token each whose contexts are of like length, gathered together."""

    __slots__ = ("blocks", "masks", "positions", "tokens", "width")

    def __init__(self, tokens: Tensor, positions: Tensor, blocks: Tensor, page: int) -> None:
        self.tokens = tokens
        self.positions = positions
        self.blocks = blocks.reshape(-1)
        self.width = blocks.shape[1] * page
        self.masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores, `[rows, 1, 1, width]`."""
        found = self.masks.get(window)
        if found is None:
            query = self.positions.unsqueeze(1)
            places = torch.arange(self.width, device=query.device)
            found = additive_mask(query, places, window, dtype)
            self.masks[window] = found = found.view(len(self.tokens), 1, 1, self.width)
        return found


_GATHERED_TOKENS = 4096
"""Tokens of context gathered at once: what is copied should still be cached when it is read."""
_GATHERED_TOKENS_ON_DEVICE = 32768
"""As many where a group costs launches instead, and what is gathered only memory."""


def _decode_groups(batch: AttentionBatch, page: int) -> list[_DecodeGroup]:
    prefixes = batch.prefixes
    rows = np.flatnonzero(batch.lengths == 1)
    rows = rows[np.argsort(prefixes[rows], kind="stable")]
    most = _GATHERED_TOKENS if batch.device.type == "cpu" else _GATHERED_TOKENS_ON_DEVICE
    groups = []
    end = len(rows)
    while end > 0:
        # Longest first, so that a group's width is known from its first member.
        columns = int(prefixes[rows[end - 1]]) // page + 1
        start = max(0, end - max(1, most // (columns * page)))
        members = rows[start:end]
        tokens, positions, held = all_on_device(
            batch.device,
            batch.starts[members].astype(np.int64),
            prefixes[members].astype(np.int64),
            batch.held[members, :columns],
        )
        groups.append(_DecodeGroup(tokens, positions, held, page))
        end = start
    return groups


def additive_mask(query: Tensor, key: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return 0 where the position `query` may read `key`, else minus infinity."""
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf)


class LayerFence(Protocol):
    """What a forward waits for before it reads a layer's keys and values of earlier tokens."""

    def wait(self, layer: int) -> None:
        """Let nothing that follows run before the layer's part is in the pool."""


class Attention(Protocol):
    """A back end: writes a batch's keys and values to the pool and attends."""

    @property
    def pool(self) -> KvPool:
        """Where keys and values are kept."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: AttentionBatch,
        window: int | None,
    ) -> Tensor:
        """Return the attended values, `[tokens, heads, head_dim]`, as `query`.

        `key` and `value` are `[tokens, kv_heads, head_dim]`; they are in the pool
        afterwards. `window` is how many positions back are read, own included.
        """


class TorchAttention:
    """The reference back end."""

    __slots__ = ("pool",)

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: AttentionBatch,
        window: int | None,
    ) -> Tensor:
        # Before anything is read: a batch's tokens attend to each other.
        self.pool.store(layer, batch.slots, key, value)
        out = torch.empty_like(query)
        for group in batch.decodes:
            out[group.tokens] = self._decode(layer, group, query, window)
        # What a pool rounds is read back, so that a token reads the same in any chunk.
        exact = self.pool.form.dtype == key.dtype
        for row in np.flatnonzero(batch.lengths > 1):
            start, length = int(batch.starts[row]), int(batch.lengths[row])
            span = slice(start, start + length)
            prefix = int(batch.prefixes[row])
            if prefix == 0 and exact:
                context = key[span], value[span]
            else:
                width = -(-(prefix + length) // self.pool.shape.tokens)
                read = self._read(layer, batch.blocks[row, :width], key.dtype)
                context = read[0][: prefix + length], read[1][: prefix + length]
            _extend(query[span], *context, prefix, window, out[span])
        return out

    def _read(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        return keys.read(blocks, dtype), values.read(blocks, dtype)

    def _decode(self, layer: int, group: _DecodeGroup, query: Tensor, window: int | None) -> Tensor:
        rows, (heads, dim) = len(group.tokens), query.shape[1:]
        key, value = (
            side.view(rows, group.width, -1, dim).transpose(1, 2)
            for side in self._read(layer, group.blocks, query.dtype)
        )
        # The query heads that share a KV head stand where more tokens would.
        kv_heads = key.shape[1]
        shared = query[group.tokens].view(rows, kv_heads, heads // kv_heads, dim)
        mask = group.mask(window, query.dtype)
        attended = functional.scaled_dot_product_attention(shared, key, value, mask)
        return attended.reshape(rows, heads, dim)


_MASK_ENTRIES = 1 << 22


def _extend(
    query: Tensor, key: Tensor, value: Tensor, prefix: int, window: int | None, out: Tensor
) -> None:
    """Attend one row's chunk to its own context, `[tokens, heads, head_dim]` each."""
    length, context = len(query), len(key)
    grouped = query.shape[1] != key.shape[1]
    queries = query.transpose(0, 1).unsqueeze(0)
    keys = key.transpose(0, 1).unsqueeze(0)
    values = value.transpose(0, 1).unsqueeze(0)
    if prefix == 0 and (window is None or window >= length):
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=grouped
        )
        out.copy_(attended[0].transpose(0, 1))
        return
    # In pieces, so that a mask stays small however long the context is.
    step = max(1, _MASK_ENTRIES // context)
    for start in range(0, length, step):
        end = min(length, start + step)
        seen = prefix + end
        first = 0 if window is None else max(0, prefix + start - window + 1)
        position = torch.arange(prefix + start, seen, device=query.device).unsqueeze(1)
        read = torch.arange(first, seen, device=query.device)
        mask = additive_mask(position, read, window, query.dtype)
        attended = functional.scaled_dot_product_attention(
            queries[:, :, start:end],
            keys[:, :, first:seen],
            values[:, :, first:seen],
            mask,
            enable_gqa=grouped,
        )
        out[start:end] = attended[0].transpose(0, 1)

"""Attention whose result for a token does not depend on the batch it stands in.

Each token attends by itself, to its row's context in stretches of one length, which are
joined front to back; a context is filled up to whole stretches, whose empty end is
masked. So every kernel sees one shape: a token's result has the same bits whether it was
a prompt's or an answer's, in whatever chunk, batch or length of context beside it.
"""

import torch
from torch import Tensor

from drumline.device.attention import AttentionBatch, additive_mask
from drumline.device.kv import KvPool
from drumline.device.kv_form import KvSide

STRETCH = 512
"""Positions that torch's kernel reads between two corrections of its running maximum; a context
of other lengths would end in a stretch of another shape."""

_TOKENS_AT_A_TIME = 256

# Named outright: what chooses among kernels looks at shapes.
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class FixedAttention:
    """The reference back end of `--deterministic`. Computes in float32, whatever the pool holds."""

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
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        self.pool.store(layer, batch.slots, key, value)
        out = torch.empty_like(query)
        tokens, heads, dim = query.shape
        kv_heads = key.shape[1]
        # The query heads that share a KV head stand where a prompt's tokens would.
        shared = query.view(tokens, kv_heads, heads // kv_heads, dim).float()
        result = out.view(shared.shape)
        for row, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
            width = -(-int(batch.prefixes[row] + length) // STRETCH) * STRETCH
            read_keys, read_values = (
                self._context(side, batch.blocks[row], width) for side in (keys, values)
            )
            for first in range(start, start + length, _TOKENS_AT_A_TIME):
                span = slice(first, min(first + _TOKENS_AT_A_TIME, start + length))
                asking = shared[span]
                shape = (len(asking), kv_heads, width, dim)
                positions = batch.positions[span].unsqueeze(1)
                mask = additive_mask(positions, torch.arange(width), window, torch.float32)
                mask = mask.view(len(asking), 1, 1, width).expand(-1, -1, asking.shape[2], -1)
                result[span] = _attend(
                    asking,
                    read_keys.expand(shape),
                    read_values.expand(shape),
                    attn_mask=mask,
                )[0]
        return out

    def _context(self, side: KvSide, blocks: Tensor, width: int) -> Tensor:
        """Return one row's keys or values, `[1, kv_heads, width, head_dim]`, float32."""
        columns = width // self.pool.shape.tokens
        index = torch.zeros(columns, dtype=torch.int64)
        held = min(columns, len(blocks))
        index[:held] = blocks[:held]
        return side.read(index, torch.float32).transpose(0, 1).unsqueeze(0).contiguous()

"""The tensors of a GGUF file, under their Hugging Face names."""

import numpy as np
import torch
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.core.gguf_file import BLOCKS, GgufFile, TensorEntry
from drumline.device.weights.dequantize import dequantize
from drumline.device.weights.repack import packs
from drumline.device.weights.source import Cut, Span, StoredBlocks, all_of, stored_shape

ROPE_FACTORS = "rope_factors"
"""What each rotary frequency is divided by: a tensor that only GGUF files have."""

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    ROPE_FACTORS: "rope_freqs.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

_ROWS_AT_ONCE = 512
_BLOCK = 32
"""Values that share a scale where weights are computed as small integers."""


def gguf_name(name: str) -> str:
    """Return what a GGUF file calls the tensor of Hugging Face name `name`."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_IN_LAYER[part]}.{kind}"


class GgufWeights:
    """A GGUF file's tensors, dequantized as they are read."""

    __slots__ = ("_data", "_file", "_interleaved")

    def __init__(self, file: GgufFile, *, heads: int, kv_heads: int) -> None:
        self._file = file
        if self._file.metadata.get("split.count", 1) not in (0, 1):
            raise ConfigError(
                str(file.path), "is one part of a split GGUF file; merge the parts first"
            )
        # Copy on write: torch wants writable memory, and nothing writes to it.
        self._data = np.memmap(file.path, np.uint8, mode="c")
        # The converter of this architecture orders a head's rows as pairs of rotated dimensions;
        # here the two halves of a head rotate against each other.
        llama = self._file.metadata.get("general.architecture") == "llama"
        self._interleaved = {"attn_q": heads, "attn_k": kv_heads} if llama else {}

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._file.tensors

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ConfigError naming the file unless it says it holds `name` in this shape."""
        self._entry(gguf_name(name), shape)

    def read(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        stored = gguf_name(name)
        expected = stored_shape(out, cut)
        if cut is not None and cut.dim == 1:
            self._read_columns(stored, expected, cut.span, out)
            return
        rows = cut.span if cut is not None else all_of(out.shape[0])
        heads = self._interleaved.get(stored.split(".")[-2])
        if heads is None:
            self._read(stored, expected, rows, out)
            return
        paired = torch.empty_like(out)
        self._read(stored, expected, rows, paired)
        by_head = paired.view(-1, rows.whole // heads // 2, 2, *out.shape[1:])
        out.copy_(by_head.transpose(1, 2).reshape(out.shape))

    def blocks(
        self, name: str, shape: tuple[int, int], cut: Cut | None = None
    ) -> StoredBlocks | None:
        stored = gguf_name(name)
        entry = self._file.tensors.get(stored)
        whole = cut.stored(shape) if cut is not None else shape
        if entry is None or not packs(entry.type) or entry.shape != whole:
            return None
        values, size = BLOCKS[entry.type]
        first = skipped = 0
        if cut is not None and cut.dim == 1:
            if cut.span.start % _BLOCK or cut.span.stop % _BLOCK:
                return None
            first = cut.span.start // values * size
            skipped = cut.span.start % values
            cut = None
        rows = np.arange(shape[0], dtype=np.int64) + (cut.span.start if cut is not None else 0)
        heads = self._interleaved.get(stored.split(".")[-2])
        if heads is not None:
            half = whole[0] // heads // 2
            rows = rows.reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)
        offsets = entry.offset + rows * (entry.bytes // whole[0]) + first
        return StoredBlocks(entry.type, self._data, offsets, shape[1], skipped)

    def _read_columns(
        self, stored: str, shape: tuple[int, ...], columns: Span, out: Tensor
    ) -> None:
        """Fill `out` with columns, which lie apart in every row: whole rows are read for them.

        The rows of what is interleaved are not put in order here: its columns are never cut.
        """
        for start in range(0, shape[0], _ROWS_AT_ONCE):
            stop = min(shape[0], start + _ROWS_AT_ONCE)
            rows = torch.empty((stop - start, shape[1]), dtype=out.dtype)
            self._read(stored, shape, Span(start, stop, shape[0]), rows)
            out[start:stop] = rows[:, columns.start : columns.stop]

    def _entry(self, stored: str, shape: tuple[int, ...]) -> TensorEntry:
        entry = self._file.tensors.get(stored)
        if entry is None:
            raise ConfigError(str(self._file.path), f"lacks the tensor {stored} of shape {shape}")
        if entry.shape != shape:
            raise ConfigError(
                str(self._file.path),
                f"tensor {stored} has shape {entry.shape}; its metadata make it {shape}",
            )
        return entry

    def _read(self, stored: str, shape: tuple[int, ...], rows: Span, out: Tensor) -> None:
        entry = self._entry(stored, shape)
        first = entry.offset + entry.bytes * rows.start // rows.whole
        last = entry.offset + entry.bytes * rows.stop // rows.whole
        data = torch.from_numpy(self._data[first:last])
        dequantize(data, entry.type, out)

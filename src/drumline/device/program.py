"""A decoder's forward as one call: embedding and layers, and another one for the head.

It does what the decoder's own layers do one by one, with the same kernels, and knows no
more of the model than they. It can be run a few layers at a time, which changes no bit, and
a profile shows each call.

Thread: forward thread only.
"""

import ctypes
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor
from torch.autograd.profiler import record_function

from drumline.device.attention import AttentionBatch, LayerFence
from drumline.device.kernels.native import Heads, Layer, Machine, Matrix, Model
from drumline.device.kv import KvPool
from drumline.device.native_attention import POOLS, PlacedBatch, cache_of
from drumline.device.native_linear import NativeLinear


class LayerWeights(Struct, frozen=True, eq=False):
    """One layer's weights; `gate_up` is paired. Norms are float32."""

    qkv: NativeLinear
    out: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int | None


class ModelWeights(Struct, frozen=True, eq=False):
    """The weights of a decoder, or of a stage of one.

    `embedding` is the first stage's, `head` and the `norm` below it are the last one's;
    `frequencies` are those of the rotation.
    """

    layers: Sequence[LayerWeights]
    embedding: NativeLinear | None
    head: NativeLinear | None
    norm: Tensor | None
    frequencies: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


class Program:
    """Runs a decoder whose linear layers are all native."""

    __slots__ = ("_layers", "_machine", "_model", "_pool", "_weights")

    def __init__(self, machine: Machine, weights: ModelWeights) -> None:
        self._machine = machine
        self._weights = weights
        self._pool: KvPool | None = None
        self._layers = (Layer * len(weights.layers))(*map(_layer, weights.layers))
        inner = weights.layers[0].down.matrix.columns
        self._model = Model(
            self._layers,
            Matrix() if weights.embedding is None else weights.embedding.matrix,
            Matrix() if weights.head is None else weights.head.matrix,
            None if weights.norm is None else weights.norm.data_ptr(),
            weights.frequencies.data_ptr(),
            Heads(weights.heads, weights.kv_heads, weights.head_dim, 0, 0, 0),
            len(weights.layers),
            weights.layers[0].qkv.matrix.columns,
            inner,
            weights.eps,
            0,
        )

    def hidden(
        self,
        fed: Tensor,
        batch: AttentionBatch,
        pool: KvPool,
        fence: LayerFence | None = None,
        segments: int = 1,
    ) -> Tensor:
        """Return what the last layer made of each token, `[tokens, hidden]`.

        `fed` are token ids, or, of a stage that is not the first, `[tokens, hidden]` of before,
        which are overwritten.
        With a fence, layers run one at a time, each once its part is there; else in `segments`.
        """
        if pool is not self._pool:
            self._take(pool)
        fed = fed.contiguous()
        if self._weights.embedding is None:
            placed, x = PlacedBatch(batch), fed
        else:
            placed, x = PlacedBatch(batch, fed), torch.empty((len(fed), self._model.hidden))
        model, told = ctypes.byref(self._model), ctypes.byref(placed.told)
        count = self._model.count
        calls = count if fence is not None else segments
        for call in range(calls):
            first, last = count * call // calls, count * (call + 1) // calls
            if fence is not None:
                fence.wait(first)
            with record_function("kernels: layers"):
                self._machine.run("layers", model, told, x.data_ptr(), first, last)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits, `[rows, vocab]`, of tokens that `hidden` returned."""
        hidden = hidden.contiguous()
        out = torch.empty((len(hidden), self._model.head.rows))
        model = ctypes.byref(self._model)
        with record_function("kernels: head"):
            self._machine.run("head", model, hidden.data_ptr(), len(hidden), out.data_ptr())
        return out

    def _take(self, pool: KvPool) -> None:
        self._pool = pool
        self._model.heads.block_rows = pool.shape.rows
        self._model.heads.pool = POOLS[pool.form.dtype]
        for index, weights in enumerate(self._weights.layers):
            self._layers[index].cache = cache_of(pool, index, weights.window)


def _layer(weights: LayerWeights) -> Layer:
    matrices: list[Matrix] = [
        part.matrix for part in (weights.qkv, weights.out, weights.gate_up, weights.down)
    ]
    norms = (
        weights.attention_norm,
        weights.mlp_norm,
        weights.query_norm,
        weights.key_norm,
    )
    return Layer(*matrices, *(None if norm is None else norm.data_ptr() for norm in norms))

"""Building a decoder from a checkpoint: a rank's part of each weight, where it is computed from.

Thread: forward thread only.
"""

import logging
from collections.abc import Iterator

import torch
from msgspec import Struct
from torch import Tensor

from drumline.device.blocks import Apportioned, whole
from drumline.device.layers import (
    Backend,
    Embedding,
    GatedMlp,
    Linear,
    PartEmbedding,
    PartHead,
    RmsNorm,
    Rotary,
    SummedLinear,
    Vectors,
    rope_frequencies,
    stretched_frequencies,
)
from drumline.device.models.config import DecoderConfig, LinearRope, Llama3Rope
from drumline.device.models.decoder import Decoder, DecoderLayer, SelfAttention, Top
from drumline.device.models.shard import Shard, shard_of
from drumline.device.native_linear import (
    NativeEmbedding,
    NativeLinear,
    PackedRows,
    of_blocks,
    of_floats,
    packable,
)
from drumline.device.parallel import Alone, TensorGroup
from drumline.device.program import LayerWeights, ModelWeights, Program
from drumline.device.weights.gguf import ROPE_FACTORS
from drumline.device.weights.source import Cut, Span, WeightSource, all_of
from drumline.device.weights.store import WeightStore

_log = logging.getLogger(__name__)


class _Loader:
    """Reads a rank's part of each weight, straight into the memory it is computed from."""

    def __init__(
        self,
        source: WeightSource,
        backend: Backend,
        group: TensorGroup,
        store: WeightStore,
    ) -> None:
        self._source = source
        self._backend = backend
        self._group = group
        self._store = store
        self._kernels_floats = backend.machine if backend.one_call else None
        self._vectors_dtype = None if self._kernels_floats is None else torch.float32
        self.unpacked: list[str] = []
        """Matrices that became floats, though the kernels compute small integers."""
        self.packed: dict[str, PackedRows] = {}
        """Where the weights are that did not."""

    def vectors(self, names: list[str], spans: list[Span]) -> Tensor:
        """Return the named norms or biases, one behind the other; kernels want them in float32."""
        return self.rows(names, spans, dtype=self._vectors_dtype)

    def rows(
        self, names: list[str], spans: list[Span], *columns: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the named tensors' rows, one below the other."""
        sizes = [len(span) for span in spans]
        out = self._store.new((sum(sizes), *columns), dtype)
        for name, span, part in zip(names, spans, out.split_with_sizes(sizes), strict=True):
            self._source.read(name, part, None if len(span) == span.whole else Cut(0, span))
        return out

    def parallel(
        self, names: list[str], spans: list[Span], columns: int, bias: bool, *, paired: bool = False
    ) -> Linear:
        """Return a linear layer of which this rank has some outputs."""
        added = self.vectors([f"{name}.bias" for name in names], spans) if bias else None
        parts = [(name, (len(span), columns), Cut(0, span)) for name, span in _named(names, spans)]
        if (packed := self._packed(parts, added, paired=paired)) is not None:
            return packed
        weight = self.rows([f"{name}.weight" for name in names], spans, columns)
        return self._of_floats(weight, added, paired=paired)

    def summed(self, name: str, rows: int, span: Span, bias: bool) -> Linear:
        """Return a linear layer of which this rank has some inputs."""
        group = self._group
        if group.size == 1:
            return self.parallel([name], [all_of(rows)], span.whole, bias)
        # One of those who sum brings the bias; all have it, so that all know its name.
        held = self.vectors([f"{name}.bias"], [all_of(rows)]) if bias else None
        added = held if group.index == 0 else None
        cut = Cut(1, span)
        if (packed := self._packed([(name, (rows, len(span)), cut)], added)) is not None:
            return SummedLinear(packed, group)
        weight = self._store.new((rows, len(span)))
        self._source.read(f"{name}.weight", weight, cut)
        return SummedLinear(self._backend.linear(weight, added), group)

    def vocabulary(self, name: str, span: Span, columns: int) -> Tensor | NativeLinear:
        """Return this rank's entries of a vocabulary's vectors, as floats or packed."""
        packed = self._packed([(name, (len(span), columns), Cut(0, span))], None)
        if packed is not None:
            return packed
        weight = self.rows([f"{name}.weight"], [span], columns)
        machine = self._kernels_floats
        return weight if machine is None else of_floats(machine, weight, None)

    def embedding(self, held: Tensor | NativeLinear, span: Span) -> Vectors:
        own = NativeEmbedding(held) if isinstance(held, NativeLinear) else Embedding(held)
        if self._group.size == 1:
            return own
        return PartEmbedding(own, span.start, len(span), self._group)

    def head(self, held: Tensor | NativeLinear, shard: Shard) -> Linear:
        own = held if isinstance(held, NativeLinear) else self._backend.linear(held, None)
        if self._group.size == 1:
            return own
        return PartHead(own, shard.widest_vocab, shard.vocab.whole, self._group)

    def _of_floats(self, weight: Tensor, bias: Tensor | None, *, paired: bool) -> Linear:
        machine = self._kernels_floats
        if machine is None:
            return self._backend.linear(weight, bias)
        return of_floats(machine, weight, bias, paired=paired)

    def _packed(
        self,
        parts: list[tuple[str, tuple[int, int], Cut]],
        bias: Tensor | None,
        *,
        paired: bool = False,
    ) -> NativeLinear | None:
        """Return a layer of stored parts, one below the other, if they can be one."""
        machine = self._backend.machine
        if machine is None or not self._backend.packs:
            return None
        stored = [self._source.blocks(f"{name}.weight", shape, cut) for name, shape, cut in parts]
        held = [part for part in stored if part is not None]
        if len(held) < len(parts) or not packable(held):
            self.unpacked.extend(name for name, _, _ in parts)
            return None
        layer = of_blocks(machine, held, bias, self._store, paired=paired)
        first = 0
        for name, (count, _), cut in parts:
            own = None if len(cut.span) == cut.span.whole else cut
            self.packed[f"{name}.weight"] = PackedRows(layer, first, count, own)
            first += count
        return layer


def _named(names: list[str], spans: list[Span]) -> Iterator[tuple[str, Span]]:
    return zip(names, spans, strict=True)


class _LayerParts(Struct, frozen=True, eq=False):
    """What a layer is built of."""

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    attention_norm: RmsNorm
    mlp_norm: RmsNorm
    head_norms: tuple[RmsNorm, RmsNorm] | None


def load_decoder(
    config: DecoderConfig,
    source: WeightSource,
    backend: Backend,
    store: WeightStore,
    group: TensorGroup | None = None,
    apportioned: Apportioned = whole,
    shard: Shard | None = None,
) -> tuple[Decoder, dict[str, PackedRows]]:
    """Build this rank's part of the decoder from a checkpoint, its weights in `store`.

    Without a `group` and a `shard` that is all of it. No second copy of a weight is kept.
    Returned with it are the weights that were packed, by their names. Raises ConfigError naming
    the file of a missing or misshapen tensor.
    """
    group = group or Alone()
    shard = shard or shard_of(config, group.index, group.size)
    load = _Loader(source, backend, group, store)

    def norm(name: str, size: int) -> RmsNorm:
        return RmsNorm(load.vectors([f"{name}.weight"], [all_of(size)]), config.norm_eps)

    def layer(index: int) -> _LayerParts:
        prefix = f"model.layers.{index}"
        hidden, dim = config.hidden_size, config.head_dim
        queries, keys = _times(shard.heads, dim), _times(shard.kv_heads, dim)
        attention = f"{prefix}.self_attn"
        qkv = [f"{attention}.{part}_proj" for part in "qkv"]
        gate_up = [f"{prefix}.mlp.{part}_proj" for part in ("gate", "up")]
        inner = shard.inner
        return _LayerParts(
            qkv=load.parallel(qkv, [queries, keys, keys], hidden, config.qkv_bias),
            out=load.summed(f"{attention}.o_proj", hidden, queries, config.output_bias),
            gate_up=load.parallel(
                gate_up, [inner, inner], hidden, config.mlp_bias, paired=backend.one_call
            ),
            down=load.summed(f"{prefix}.mlp.down_proj", hidden, inner, config.mlp_bias),
            attention_norm=norm(f"{prefix}.input_layernorm", hidden),
            mlp_norm=norm(f"{prefix}.post_attention_layernorm", hidden),
            head_norms=(norm(f"{attention}.q_norm", dim), norm(f"{attention}.k_norm", dim))
            if config.qk_norm
            else None,
        )

    def vectors(name: str) -> Tensor | NativeLinear:
        return load.vocabulary(name, shard.vocab, config.hidden_size)

    embedding = vectors("model.embed_tokens") if shard.first else None
    layers = [layer(index) for index in range(shard.layers.start, shard.layers.stop)]
    top_norm, head = None, None
    if shard.last:
        top_norm = norm("model.norm", config.hidden_size)
        if not config.tied_embeddings:
            head = vectors("lm_head")
        else:
            head = vectors("model.embed_tokens") if embedding is None else embedding
    frequencies = _frequencies(config, source, store.device)
    program = None
    if backend.one_call and backend.machine is not None:
        weights = _all_native(config, shard, layers, embedding, head, top_norm, frequencies)
        program = None if weights is None else Program(backend.machine, weights)
    if load.unpacked:
        _log.warning(
            "%d matrices, such as %s, became floats: no kernel computes them as they are stored",
            len(load.unpacked),
            load.unpacked[0],
        )
    decoder = Decoder(
        None if embedding is None else load.embedding(embedding, shard.vocab),
        [
            _layer(config, shard, index, parts)
            for index, parts in enumerate(layers, shard.layers.start)
        ],
        None if head is None or top_norm is None else Top(top_norm, load.head(head, shard)),
        Rotary(frequencies),
        apportioned,
        program,
    )
    return decoder, load.packed


def _layer(config: DecoderConfig, shard: Shard, index: int, parts: _LayerParts) -> DecoderLayer:
    return DecoderLayer(
        parts.attention_norm,
        SelfAttention(config, shard, index, parts.qkv, parts.out, parts.head_norms),
        parts.mlp_norm,
        GatedMlp(parts.gate_up, parts.down),
    )


def _all_native(
    config: DecoderConfig,
    shard: Shard,
    layers: list[_LayerParts],
    embedding: Tensor | NativeLinear | None,
    head: Tensor | NativeLinear | None,
    norm: RmsNorm | None,
    frequencies: Tensor,
) -> ModelWeights | None:
    """Return this stage's weights if kernels compute all of them."""
    made = []
    windows = config.windows[shard.layers.start : shard.layers.stop]
    for parts, window in zip(layers, windows, strict=True):
        qkv, out, gate_up, down = parts.qkv, parts.out, parts.gate_up, parts.down
        if not isinstance(qkv, NativeLinear) or not isinstance(out, NativeLinear):
            return None
        if not isinstance(gate_up, NativeLinear) or not isinstance(down, NativeLinear):
            return None
        query_norm, key_norm = parts.head_norms or (None, None)
        made.append(
            LayerWeights(
                qkv,
                out,
                gate_up,
                down,
                parts.attention_norm.weight,
                parts.mlp_norm.weight,
                None if query_norm is None else query_norm.weight,
                None if key_norm is None else key_norm.weight,
                window,
            )
        )
    if isinstance(embedding, Tensor) or isinstance(head, Tensor):
        return None
    return ModelWeights(
        made,
        embedding,
        head,
        None if norm is None else norm.weight,
        frequencies,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.norm_eps,
    )


def _times(span: Span, size: int) -> Span:
    """Return the span of what each entry of `span` has `size` of."""
    return Span(span.start * size, span.stop * size, span.whole * size)


def _frequencies(config: DecoderConfig, source: WeightSource, device: torch.device) -> Tensor:
    plain = rope_frequencies(config.head_dim, config.rope_theta)
    match config.rope_scaling:
        case LinearRope(factor=factor):
            plain = plain / factor
        case Llama3Rope():
            scaling = config.rope_scaling
            plain = stretched_frequencies(
                plain,
                scaling.factor,
                scaling.low_freq_factor,
                scaling.high_freq_factor,
                scaling.original_positions,
            )
        case None:
            pass
    if source.has(ROPE_FACTORS):
        factors = torch.empty_like(plain)
        source.read(ROPE_FACTORS, factors)
        plain = plain / factors
    return plain.to(device)

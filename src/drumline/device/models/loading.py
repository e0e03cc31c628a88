"""Building a decoder from a checkpoint: a rank's part of each weight, where it is computed from.

Thread: forward thread only.
"""

import logging
from collections import Counter

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
from drumline.device.models.matrices import (
    EMBEDDING,
    HEAD,
    Joined,
    Part,
    layer_matrices,
    stored,
    vectors,
)
from drumline.device.models.shard import Shard, shard_of
from drumline.device.native_linear import (
    NativeEmbedding,
    NativeLinear,
    PackedRows,
    of_blocks,
    of_floats,
)
from drumline.device.parallel import Alone, TensorGroup
from drumline.device.program import LayerWeights, ModelWeights, Program
from drumline.device.weights.gguf import ROPE_FACTORS
from drumline.device.weights.repack import described
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
        self.became: Counter[str] = Counter()
        """How many of those were stored as what, and became what."""

    def vectors(self, names: list[str], spans: list[Span]) -> Tensor:
        """Return the named norms or biases, one behind the other; kernels want them in float32."""
        sizes = [len(span) for span in spans]
        out = self._store.new((sum(sizes),), self._vectors_dtype)
        for name, span, part in zip(names, spans, out.split_with_sizes(sizes), strict=True):
            self._source.read(name, part, None if len(span) == span.whole else Cut(0, span))
        return out

    def parallel(self, parts: Joined, bias: bool, *, paired: bool = False) -> Linear:
        """Return a linear layer of which this rank has some outputs."""
        added = self._biases(parts) if bias else None
        if (packed := self._packed(parts, added, paired=paired)) is not None:
            return packed
        return self._of_floats(self._weight(parts), added, paired=paired)

    def summed(self, part: Part, bias: bool) -> Linear:
        """Return a linear layer of which this rank has some inputs."""
        group = self._group
        if group.size == 1:
            return self.parallel([part], bias)
        # One of those who sum brings the bias; all have it, so that all know its name.
        held = self._biases([part]) if bias else None
        added = held if group.index == 0 else None
        if (packed := self._packed([part], added)) is not None:
            return SummedLinear(packed, group)
        return SummedLinear(self._backend.linear(self._weight([part]), added), group)

    def vocabulary(self, part: Part) -> Tensor | NativeLinear:
        """Return this rank's entries of a vocabulary's vectors, as floats or packed."""
        if (packed := self._packed([part], None)) is not None:
            return packed
        weight = self._weight([part])
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

    def _biases(self, parts: Joined) -> Tensor:
        spans = [part.cut.span if part.cut.dim == 0 else all_of(part.shape[0]) for part in parts]
        return self.vectors([f"{part.name}.bias" for part in parts], spans)

    def _weight(self, parts: Joined) -> Tensor:
        """Return parts as floats, one below the other."""
        sizes = [part.shape[0] for part in parts]
        out = self._store.new((sum(sizes), parts[0].shape[1]))
        for part, own in zip(parts, out.split_with_sizes(sizes), strict=True):
            self._source.read(f"{part.name}.weight", own, None if part.whole else part.cut)
        return out

    def _packed(
        self, parts: Joined, bias: Tensor | None, *, paired: bool = False
    ) -> NativeLinear | None:
        """Return a layer of parts, one below the other, if all are stored as small integers."""
        machine = self._backend.machine
        if machine is None or not self._backend.packs:
            return None
        held = stored(self._source, parts)
        if held is None:
            self.unpacked.extend(part.name for part in parts)
            return None
        layer = of_blocks(machine, held, bias, self._store, paired=paired)
        self.became.update(described(each.kind, layer.matrix.kind) for each in held)
        first = 0
        for part in parts:
            own = None if part.whole else part.cut
            self.packed[f"{part.name}.weight"] = PackedRows(layer, first, part.shape[0], own)
            first += part.shape[0]
        return layer


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
        attention = f"{prefix}.self_attn"
        hidden, dim = config.hidden_size, config.head_dim
        matrices = layer_matrices(config, shard, index)
        return _LayerParts(
            qkv=load.parallel(matrices.qkv, config.qkv_bias),
            out=load.summed(matrices.out, config.output_bias),
            gate_up=load.parallel(matrices.gate_up, config.mlp_bias, paired=backend.one_call),
            down=load.summed(matrices.down, config.mlp_bias),
            attention_norm=norm(f"{prefix}.input_layernorm", hidden),
            mlp_norm=norm(f"{prefix}.post_attention_layernorm", hidden),
            head_norms=(norm(f"{attention}.q_norm", dim), norm(f"{attention}.k_norm", dim))
            if config.qk_norm
            else None,
        )

    def table(name: str) -> Tensor | NativeLinear:
        return load.vocabulary(vectors(config, shard, name))

    embedding = table(EMBEDDING) if shard.first else None
    layers = [layer(index) for index in range(shard.layers.start, shard.layers.stop)]
    top_norm, head = None, None
    if shard.last:
        top_norm = norm("model.norm", config.hidden_size)
        if not config.tied_embeddings:
            head = table(HEAD)
        else:
            head = table(EMBEDDING) if embedding is None else embedding
    frequencies = _frequencies(config, source, store.device)
    program = None
    if backend.one_call and backend.machine is not None:
        weights = _all_native(config, shard, layers, embedding, head, top_norm, frequencies)
        program = None if weights is None else Program(backend.machine, weights)
    if load.became:
        became = "; ".join(f"{count} of {what}" for what, count in sorted(load.became.items()))
        _log.info("matrices that stay small integers: %s", became)
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

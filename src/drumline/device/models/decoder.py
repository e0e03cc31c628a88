"""The Llama-like decoder: Llama, SmolLM2, Mistral, Qwen2 and Qwen3.

The families differ in biases, in norms on queries and keys, in rope and in
windows; `DecoderConfig` says which of them a checkpoint has. A rank of a
tensor-parallel group builds its `Shard` of it.
"""

import torch
from torch import Tensor

from drumline.contract.specs import HistoryNeed
from drumline.device.attention import Attention, AttentionBatch, LayerFence
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
    rope_frequencies,
    rotate,
    stretched_frequencies,
)
from drumline.device.models.config import DecoderConfig, LinearRope, Llama3Rope
from drumline.device.models.shard import Shard, shard_of
from drumline.device.parallel import Alone, TensorGroup
from drumline.device.weights.gguf import ROPE_FACTORS
from drumline.device.weights.source import Cut, Span, WeightSource, all_of
from drumline.device.weights.store import WeightStore


class _Step:
    """What every layer of one forward is handed beside its input."""

    __slots__ = ("angles", "apportioned", "attention", "batch")

    def __init__(
        self,
        angles: tuple[Tensor, ...],
        attention: Attention,
        batch: AttentionBatch,
        apportioned: Apportioned,
    ) -> None:
        self.angles = angles
        self.attention = attention
        self.batch = batch
        self.apportioned = apportioned


class SelfAttention:
    """Queries, keys and values from one product, rotated and attended."""

    __slots__ = ("_head_dim", "_index", "_norms", "_out", "_qkv", "_sizes", "_window")

    def __init__(
        self,
        config: DecoderConfig,
        shard: Shard,
        index: int,
        qkv: Linear,
        out: Linear,
        norms: tuple[RmsNorm, RmsNorm] | None,
    ) -> None:
        self._index = index
        self._qkv = qkv
        self._out = out
        self._norms = norms
        self._head_dim = config.head_dim
        self._sizes = [len(shard.heads), len(shard.kv_heads), len(shard.kv_heads)]
        self._window = config.windows[index]

    def heads(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, `[tokens, heads, head_dim]` each."""
        heads = self._qkv(x).view(len(x), -1, self._head_dim)
        query, key, value = heads.split_with_sizes(self._sizes, 1)
        if self._norms is not None:
            query, key = self._norms[0](query), self._norms[1](key)
        return rotate(query, angles), rotate(key, angles), value

    def attended(self, heads: tuple[Tensor, ...], step: _Step) -> Tensor:
        """Return what the queries read, as they are shaped."""
        query, key, value = heads
        return step.attention(self._index, query, key, value, step.batch, self._window)

    def out(self, attended: Tensor) -> Tensor:
        """Bring what the heads read together, `[tokens, hidden]`."""
        return self._out(attended.view(len(attended), -1))


class DecoderLayer:
    """Attention and feed-forward, each behind a norm and added to what came in."""

    __slots__ = ("_attention", "_attention_norm", "_mlp", "_mlp_norm")

    def __init__(
        self, attention_norm: RmsNorm, attention: SelfAttention, mlp_norm: RmsNorm, mlp: GatedMlp
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def __call__(self, x: Tensor, step: _Step) -> Tensor:
        heads = step.apportioned(self._before, x, *step.angles)
        attended = self._attention.attended(heads, step)
        return step.apportioned(self._behind, x, attended)[0]

    def _before(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, ...]:
        return self._attention.heads(self._attention_norm(x), (cosine, sine))

    def _behind(self, x: Tensor, attended: Tensor) -> tuple[Tensor]:
        x = x + self._attention.out(attended)
        return (x + self._mlp(self._mlp_norm(x)),)


class Decoder:
    """The whole model: token ids in, logits out."""

    history: HistoryNeed | None = None
    """These models read no tokens but those they are fed."""

    __slots__ = ("_apportioned", "_embedding", "_head", "_layers", "_norm", "_rotary")

    def __init__(
        self,
        embedding: Embedding | PartEmbedding,
        layers: list[DecoderLayer],
        norm: RmsNorm,
        head: Linear,
        rotary: Rotary,
        apportioned: Apportioned = whole,
    ) -> None:
        self._apportioned = apportioned
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rotary = rotary

    def forward(
        self,
        ids: Tensor,
        batch: AttentionBatch,
        attention: Attention,
        sampled: Tensor,
        fence: LayerFence | None = None,
    ) -> Tensor:
        """Compute one ragged batch and return float32 logits, `[len(sampled), vocab]`.

        `ids` has a token an entry; `sampled` are the indices of those whose next
        token is asked for.
        """
        return self.logits(self.hidden(ids, batch, attention, fence)[sampled])

    def hidden(
        self,
        ids: Tensor,
        batch: AttentionBatch,
        attention: Attention,
        fence: LayerFence | None = None,
    ) -> Tensor:
        """Compute one ragged batch and return what the last layer made of each token.

        `ids` has a token an entry. A layer's part of what is loaded is waited for before it
        attends.
        """
        x = self._embedding(ids)

        def angles(positions: Tensor) -> tuple[Tensor, ...]:
            return self._rotary.angles(positions, x.dtype)

        turned = self._apportioned(angles, batch.positions)
        step = _Step(turned, attention, batch, self._apportioned)
        for index, layer in enumerate(self._layers):
            if fence is not None:
                fence.wait(index)
            x = layer(x, step)
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """Return in float32 what the head is fed of tokens that `hidden` returned."""
        return self._apportioned(self._last_norm, hidden)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits, `[rows, vocab]`, of tokens that `hidden` returned.

        Collective, where the vocabulary lies in parts: every rank, with as many rows.
        """
        return self._apportioned(self._top, hidden)[0]

    def _last_norm(self, x: Tensor) -> tuple[Tensor]:
        return (self._norm(x).float(),)

    def _top(self, x: Tensor) -> tuple[Tensor]:
        return (self._head(self._norm(x)).float(),)


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

    def rows(self, names: list[str], spans: list[Span], *columns: int) -> Tensor:
        """Return the named tensors' rows, one below the other."""
        sizes = [len(span) for span in spans]
        out = self._store.new((sum(sizes), *columns))
        for name, span, part in zip(names, spans, out.split_with_sizes(sizes), strict=True):
            self._source.read(name, part, None if len(span) == span.whole else Cut(0, span))
        return out

    def parallel(self, names: list[str], spans: list[Span], columns: int, bias: bool) -> Linear:
        """Return a linear layer of which this rank has some outputs."""
        weight = self.rows([f"{name}.weight" for name in names], spans, columns)
        added = self.rows([f"{name}.bias" for name in names], spans) if bias else None
        return self._backend.linear(weight, added)

    def summed(self, name: str, rows: int, span: Span, bias: bool) -> Linear:
        """Return a linear layer of which this rank has some inputs."""
        group = self._group
        if group.size == 1:
            return self.parallel([name], [all_of(rows)], span.whole, bias)
        weight = self._store.new((rows, len(span)))
        self._source.read(f"{name}.weight", weight, Cut(1, span))
        # One of those who sum brings the bias; all have it, so that all know its name.
        added = self.rows([f"{name}.bias"], [all_of(rows)]) if bias else None
        own = self._backend.linear(weight, added if group.index == 0 else None)
        return SummedLinear(own, group)

    def embedding(self, weight: Tensor, span: Span) -> Embedding | PartEmbedding:
        if self._group.size == 1:
            return Embedding(weight)
        return PartEmbedding(weight, span.start, self._group)

    def head(self, weight: Tensor, shard: Shard) -> Linear:
        own = self._backend.linear(weight, None)
        if self._group.size == 1:
            return own
        return PartHead(own, shard.widest_vocab, shard.vocab.whole, self._group)


def load_decoder(
    config: DecoderConfig,
    source: WeightSource,
    backend: Backend,
    store: WeightStore,
    group: TensorGroup | None = None,
    apportioned: Apportioned = whole,
) -> Decoder:
    """Build this rank's part of the decoder from a checkpoint, its weights in `store`.

    Without a `group` that is all of it. No second copy of a weight is kept. Raises
    ConfigError naming the file of a missing or misshapen tensor.
    """
    group = group or Alone()
    shard = shard_of(config, group.index, group.size)
    load = _Loader(source, backend, group, store)

    def norm(name: str, size: int) -> RmsNorm:
        return RmsNorm(load.rows([f"{name}.weight"], [all_of(size)]), config.norm_eps)

    def layer(index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}"
        hidden, dim = config.hidden_size, config.head_dim
        queries, keys = _times(shard.heads, dim), _times(shard.kv_heads, dim)
        attention = f"{prefix}.self_attn"
        norms = (
            (norm(f"{attention}.q_norm", dim), norm(f"{attention}.k_norm", dim))
            if config.qk_norm
            else None
        )
        qkv = [f"{attention}.{part}_proj" for part in "qkv"]
        gate_up = [f"{prefix}.mlp.{part}_proj" for part in ("gate", "up")]
        return DecoderLayer(
            norm(f"{prefix}.input_layernorm", hidden),
            SelfAttention(
                config,
                shard,
                index,
                load.parallel(qkv, [queries, keys, keys], hidden, config.qkv_bias),
                load.summed(f"{attention}.o_proj", hidden, queries, config.output_bias),
                norms,
            ),
            norm(f"{prefix}.post_attention_layernorm", hidden),
            GatedMlp(
                load.parallel(gate_up, [shard.inner, shard.inner], hidden, config.mlp_bias),
                load.summed(f"{prefix}.mlp.down_proj", hidden, shard.inner, config.mlp_bias),
            ),
        )

    def vocabulary(name: str) -> Tensor:
        return load.rows([f"{name}.weight"], [shard.vocab], config.hidden_size)

    embedding = vocabulary("model.embed_tokens")
    return Decoder(
        load.embedding(embedding, shard.vocab),
        [layer(index) for index in range(config.layers)],
        norm("model.norm", config.hidden_size),
        load.head(embedding if config.tied_embeddings else vocabulary("lm_head"), shard),
        Rotary(_frequencies(config, source, store.device)),
        apportioned,
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


def weight_count(config: DecoderConfig, shard: Shard | None = None) -> int:
    """Return how many weights the decoder, or a rank's part of it, has; memory is sized by it."""
    shard = shard or shard_of(config)
    heads = 2 * len(shard.heads) + 2 * len(shard.kv_heads)
    attention = config.hidden_size * config.head_dim * heads
    mlp = 3 * config.hidden_size * len(shard.inner)
    embeddings = (1 if config.tied_embeddings else 2) * len(shard.vocab) * config.hidden_size
    return config.layers * (attention + mlp) + embeddings

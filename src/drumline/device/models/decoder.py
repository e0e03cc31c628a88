"""The Llama-like decoder: Llama, SmolLM2, Mistral, Qwen2 and Qwen3.

The families differ in biases, in norms on queries and keys, in rope and in
windows; `DecoderConfig` says which of them a checkpoint has. A rank builds its `Shard`
of it: a stage's layers, and of these its tensor-parallel part.
"""

from torch import Tensor

from drumline.contract.specs import HistoryNeed
from drumline.core.errors import InvariantError
from drumline.device.attention import Attention, AttentionBatch, LayerFence
from drumline.device.blocks import Apportioned, whole
from drumline.device.layers import (
    GatedMlp,
    Linear,
    RmsNorm,
    Rotary,
    Vectors,
    rotate,
)
from drumline.device.models.config import DecoderConfig
from drumline.device.models.shard import Shard, shard_of
from drumline.device.program import Program


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
        self._index = index - shard.layers.start  # in this rank's pool
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


class Top:
    """What stands above the last layer."""

    __slots__ = ("head", "norm")

    def __init__(self, norm: RmsNorm, head: Linear) -> None:
        self.norm = norm
        self.head = head


class Decoder:
    """A model, token ids in, logits out; or a stage of it.

    The first stage alone has an `embedding`, the last alone a `top`. Between them goes what a
    layer made of each token.
    """

    history: HistoryNeed | None = None
    """These models read no tokens but those they are fed."""

    __slots__ = (
        "_apportioned",
        "_embedding",
        "_layers",
        "_rotary",
        "_top",
        "program",
    )

    def __init__(
        self,
        embedding: Vectors | None,
        layers: list[DecoderLayer],
        top: Top | None,
        rotary: Rotary,
        apportioned: Apportioned = whole,
        program: Program | None = None,
    ) -> None:
        self.program = program
        """Computes all of this in one call, where it can."""
        self._apportioned = apportioned
        self._embedding = embedding
        self._layers = layers
        self._top = top
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
        fed: Tensor,
        batch: AttentionBatch,
        attention: Attention,
        fence: LayerFence | None = None,
    ) -> Tensor:
        """Compute one ragged batch and return what the last layer made of each token.

        `fed` are token ids, an entry each, or what the stage before made of them. A layer's part
        of what is loaded is waited for before it attends.
        """
        if self.program is not None:
            return self.program.hidden(fed, batch, attention.pool, fence)
        x = fed if self._embedding is None else self._embedding(fed)

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
        return self._apportioned(self._normed, hidden)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits, `[rows, vocab]`, of tokens that `hidden` returned.

        Collective, where the vocabulary lies in parts: every rank, with as many rows.
        """
        if self.program is not None:
            return self.program.logits(hidden)
        return self._apportioned(self._headed, hidden)[0]

    def _normed(self, x: Tensor) -> tuple[Tensor]:
        return (self._above.norm(x).float(),)

    def _headed(self, x: Tensor) -> tuple[Tensor]:
        return (self._above.head(self._above.norm(x)).float(),)

    @property
    def _above(self) -> Top:
        if self._top is None:
            raise InvariantError("the last stage alone has a head")
        return self._top


def weight_count(config: DecoderConfig, shard: Shard | None = None) -> int:
    """Return how many weights the decoder, or a rank's part of it, has; memory is sized by it."""
    shard = shard or shard_of(config)
    heads = 2 * len(shard.heads) + 2 * len(shard.kv_heads)
    attention = config.hidden_size * config.head_dim * heads
    mlp = 3 * config.hidden_size * len(shard.inner)
    tables = int(shard.first) + int(shard.last)
    if config.tied_embeddings and tables == 2:  # noqa: PLR2004 - one table serves as both
        tables = 1
    return len(shard.layers) * (attention + mlp) + tables * len(shard.vocab) * config.hidden_size

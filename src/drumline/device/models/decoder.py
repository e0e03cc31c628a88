"""The Llama-like decoder: Llama, SmolLM2, Mistral, Qwen2 and Qwen3.

The families differ in biases, in norms on queries and keys, in rope and in
windows; `DecoderConfig` says which of them a checkpoint has.
"""

import torch
from torch import Tensor
from torch.nn import functional

from drumline.device.attention import Attention, AttentionBatch
from drumline.device.layers import (
    Backend,
    GatedMlp,
    Linear,
    RmsNorm,
    Rotary,
    rope_frequencies,
    rotate,
    stretched_frequencies,
)
from drumline.device.models.config import DecoderConfig, LinearRope, Llama3Rope
from drumline.device.weights.gguf import ROPE_FACTORS
from drumline.device.weights.source import WeightSource, new_weight


class SelfAttention:
    """Queries, keys and values from one product, rotated and attended."""

    __slots__ = ("_head_dim", "_index", "_norms", "_out", "_qkv", "_sizes", "_window")

    def __init__(
        self,
        config: DecoderConfig,
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
        self._sizes = [config.heads, config.kv_heads, config.kv_heads]
        self._window = config.windows[index]

    def __call__(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: Attention,
        batch: AttentionBatch,
    ) -> Tensor:
        heads = self._qkv(x).view(len(x), -1, self._head_dim)
        query, key, value = heads.split_with_sizes(self._sizes, 1)
        if self._norms is not None:
            query, key = self._norms[0](query), self._norms[1](key)
        query, key = rotate(query, angles), rotate(key, angles)
        attended = attention(self._index, query, key, value, batch, self._window)
        return self._out(attended.view(len(x), -1))


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

    def __call__(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: Attention,
        batch: AttentionBatch,
    ) -> Tensor:
        x = x + self._attention(self._attention_norm(x), angles, attention, batch)
        return x + self._mlp(self._mlp_norm(x))


class Decoder:
    """The whole model: token ids in, logits out."""

    __slots__ = ("_embedding", "_head", "_layers", "_norm", "_rotary")

    def __init__(
        self,
        embedding: Tensor,
        layers: list[DecoderLayer],
        norm: RmsNorm,
        head: Linear,
        rotary: Rotary,
    ) -> None:
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rotary = rotary

    def forward(
        self, ids: Tensor, batch: AttentionBatch, attention: Attention, sampled: Tensor
    ) -> Tensor:
        """Compute one ragged batch and return float32 logits, `[len(sampled), vocab]`.

        `ids` has a token an entry; `sampled` are the indices of those whose next
        token is asked for.
        """
        x = functional.embedding(ids, self._embedding)
        angles = self._rotary.angles(batch.positions, x.dtype)
        for layer in self._layers:
            x = layer(x, angles, attention, batch)
        return self._head(self._norm(x[sampled])).float()


def load_decoder(
    config: DecoderConfig,
    source: WeightSource,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """Build the decoder from a checkpoint.

    Every weight is read straight into the memory it is computed from; no second
    copy is kept. Raises ConfigError naming the file of a missing or misshapen tensor.
    """

    def stacked(names: list[str], rows: list[int], *columns: int) -> Tensor:
        out = new_weight((sum(rows), *columns), dtype, device)
        for name, part in zip(names, out.split_with_sizes(rows), strict=True):
            source.read(name, part)
        return out

    def linear(names: list[str], rows: list[int], columns: int, bias: bool) -> Linear:
        weight = stacked([f"{name}.weight" for name in names], rows, columns)
        added = stacked([f"{name}.bias" for name in names], rows) if bias else None
        return backend.linear(weight, added)

    def norm(name: str, size: int) -> RmsNorm:
        return RmsNorm(stacked([f"{name}.weight"], [size]), config.norm_eps)

    def layer(index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}"
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_rows, kv_rows = config.heads * dim, config.kv_heads * dim
        attention = f"{prefix}.self_attn"
        norms = (
            (norm(f"{attention}.q_norm", dim), norm(f"{attention}.k_norm", dim))
            if config.qk_norm
            else None
        )
        return DecoderLayer(
            norm(f"{prefix}.input_layernorm", hidden),
            SelfAttention(
                config,
                index,
                linear(
                    [f"{attention}.{part}_proj" for part in "qkv"],
                    [q_rows, kv_rows, kv_rows],
                    hidden,
                    config.qkv_bias,
                ),
                linear([f"{attention}.o_proj"], [hidden], q_rows, config.output_bias),
                norms,
            ),
            norm(f"{prefix}.post_attention_layernorm", hidden),
            GatedMlp(
                linear(
                    [f"{prefix}.mlp.{part}_proj" for part in ("gate", "up")],
                    [inner, inner],
                    hidden,
                    config.mlp_bias,
                ),
                linear([f"{prefix}.mlp.down_proj"], [hidden], inner, config.mlp_bias),
            ),
        )

    embedding = stacked(["model.embed_tokens.weight"], [config.vocab_size], config.hidden_size)
    head = (
        backend.linear(embedding, None)
        if config.tied_embeddings
        else linear(["lm_head"], [config.vocab_size], config.hidden_size, bias=False)
    )
    return Decoder(
        embedding,
        [layer(index) for index in range(config.layers)],
        norm("model.norm", config.hidden_size),
        head,
        Rotary(_frequencies(config, source, device)),
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


def weight_count(config: DecoderConfig) -> int:
    """Return how many weights the decoder has, for the sizing of memory."""
    attention = config.hidden_size * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    embeddings = (1 if config.tied_embeddings else 2) * config.vocab_size * config.hidden_size
    return config.layers * (attention + mlp) + embeddings

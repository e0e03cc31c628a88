"""Which part of a decoder a rank holds: some layers, and of each a tensor-parallel part.

Layers go in stages that follow each other, as even as can be. The last stage, which computes
the head beside its own, has no more than any other.
Heads go whole, with the KV head that they share; where there are fewer KV heads than
ranks, those that share one hold a copy each. Parts need not be of one size: a model of
nine heads runs on two ranks.
"""

from msgspec import Struct

from drumline.core.errors import ConfigError
from drumline.device.models.config import DecoderConfig
from drumline.device.weights.source import Span


class Shard(Struct, frozen=True):
    """One rank's part. A group of one holds all."""

    index: int
    size: int
    heads: Span
    kv_heads: Span
    inner: Span
    """Of the feed-forward block."""
    vocab: Span
    layers: Span
    """Of all ranks of a stage."""

    @property
    def first(self) -> bool:
        """Whether it begins with tokens, and so has their vectors."""
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        """Whether it ends with the head."""
        return self.layers.stop == self.layers.whole

    @property
    def widest_vocab(self) -> int:
        """Entries of the largest part of the vocabulary: all but the last have as many."""
        return -(-self.vocab.whole // self.size)


def shard_of(
    config: DecoderConfig, index: int = 0, size: int = 1, stage: int = 0, stages: int = 1
) -> Shard:
    """Return the part of rank `index` of the `size` of a stage.

    Raises ConfigError where there are more ranks than heads, or more stages than layers.
    """
    if stages > config.layers:
        raise ConfigError(
            "--pipeline-parallel-size",
            f"{stages} stages cannot share the model's {config.layers} layers; at most one a layer",
        )
    heads, kv_heads = config.heads, config.kv_heads
    if size > heads:
        raise ConfigError(
            "--tensor-parallel-size",
            f"{size} ranks cannot share the model's {heads} attention heads; at most one a head",
        )
    shared = heads // kv_heads
    if size <= kv_heads:
        kv = _even(kv_heads, index, size)
        queries = Span(kv.start * shared, kv.stop * shared, heads)
    else:
        # Some ranks share a KV head, and divide the query heads that read it.
        held = index * kv_heads // size
        sharers = [rank for rank in range(size) if rank * kv_heads // size == held]
        part = _even(shared, sharers.index(index), len(sharers))
        kv = Span(held, held + 1, kv_heads)
        queries = Span(held * shared + part.start, held * shared + part.stop, heads)
    step = -(-config.vocab_size // size)
    vocab = Span(
        min(index * step, config.vocab_size),
        min((index + 1) * step, config.vocab_size),
        config.vocab_size,
    )
    inner = _even(config.intermediate_size, index, size)
    layers = Span(
        -(-config.layers * stage // stages),
        -(-config.layers * (stage + 1) // stages),
        config.layers,
    )
    return Shard(index, size, queries, kv, inner, vocab, layers)


def most_kv_heads(config: DecoderConfig, size: int) -> int:
    """Return the KV heads of the rank that holds most."""
    return max(1, -(-config.kv_heads // size))


def most_layers(config: DecoderConfig, stages: int) -> int:
    """Return the layers of the stage that holds most."""
    return -(-config.layers // stages)


def _even(whole: int, index: int, size: int) -> Span:
    return Span(whole * index // size, whole * (index + 1) // size, whole)

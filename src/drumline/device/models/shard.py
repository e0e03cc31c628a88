"""Which part of a decoder a rank of a tensor-parallel group holds.

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

    @property
    def widest_vocab(self) -> int:
        """Entries of the largest part of the vocabulary: all but the last have as many."""
        return -(-self.vocab.whole // self.size)


def shard_of(config: DecoderConfig, index: int = 0, size: int = 1) -> Shard:
    """Return the part of rank `index` of `size`.

    Raises ConfigError where there are more ranks than heads.
    """
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
    return Shard(index, size, queries, kv, _even(config.intermediate_size, index, size), vocab)


def most_kv_heads(config: DecoderConfig, size: int) -> int:
    """Return the KV heads of the rank that holds most."""
    return max(1, -(-config.kv_heads // size))


def _even(whole: int, index: int, size: int) -> Span:
    return Span(whole * index // size, whole * (index + 1) // size, whole)

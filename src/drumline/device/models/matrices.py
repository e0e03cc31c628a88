"""Which matrices of a checkpoint a rank's layers are computed with, and what part of each.

Thread: any.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from drumline.device.models.config import DecoderConfig
from drumline.device.models.shard import Shard
from drumline.device.weights.source import Cut, Span, StoredBlocks, WeightSource

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


class Part(Struct, frozen=True):
    """A stored matrix, or what a rank has of it."""

    name: str
    shape: tuple[int, int]
    """Of what the rank has."""
    cut: Cut

    @property
    def whole(self) -> bool:
        return len(self.cut.span) == self.cut.span.whole


Joined = Sequence[Part]
"""Parts that are one matrix, one below the other; all have the same columns."""


class LayerMatrices(Struct, frozen=True):
    """The matrices of one layer."""

    qkv: Joined
    out: Part
    gate_up: Joined
    down: Part


def layer_matrices(config: DecoderConfig, shard: Shard, index: int) -> LayerMatrices:
    """Return what the rank of a shard has of layer `index`."""
    attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys, inner = _times(shard.heads, dim), _times(shard.kv_heads, dim), shard.inner
    return LayerMatrices(
        qkv=[
            _rows(f"{attention}.{part}_proj", span, hidden)
            for part, span in zip("qkv", (queries, keys, keys), strict=True)
        ],
        out=_columns(f"{attention}.o_proj", hidden, queries),
        gate_up=[_rows(f"{mlp}.{part}_proj", inner, hidden) for part in ("gate", "up")],
        down=_columns(f"{mlp}.down_proj", hidden, inner),
    )


def vectors(config: DecoderConfig, shard: Shard, name: str) -> Part:
    """Return the rank's entries of a vocabulary's vectors, `EMBEDDING` or `HEAD`."""
    return _rows(name, shard.vocab, config.hidden_size)


def all_matrices(config: DecoderConfig, shard: Shard) -> Iterator[Joined]:
    """Yield every matrix that the rank of a shard holds."""
    for index in range(shard.layers.start, shard.layers.stop):
        layer = layer_matrices(config, shard, index)
        yield from (layer.qkv, [layer.out], layer.gate_up, [layer.down])
    if shard.first or (shard.last and config.tied_embeddings):
        yield [vectors(config, shard, EMBEDDING)]
    if shard.last and not config.tied_embeddings:
        yield [vectors(config, shard, HEAD)]


def stored(source: WeightSource, parts: Joined) -> list[StoredBlocks] | None:
    """Return parts as they are stored, if all are small integers."""
    found = [source.blocks(f"{part.name}.weight", part.shape, part.cut) for part in parts]
    held = [blocks for blocks in found if blocks is not None]
    return held if len(held) == len(parts) else None


def _rows(name: str, span: Span, columns: int) -> Part:
    return Part(name, (len(span), columns), Cut(0, span))


def _columns(name: str, rows: int, span: Span) -> Part:
    return Part(name, (rows, len(span)), Cut(1, span))


def _times(span: Span, size: int) -> Span:
    """Return the span of what each entry of `span` has `size` of."""
    return Span(span.start * size, span.stop * size, span.whole * size)

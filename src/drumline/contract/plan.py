"""The plan: what the scheduler decided for one round, as a value.

A plan names pool rows, not requests: `bound` says which request a row serves
from this plan on. The block tables travel as patches; the data plane applies a
plan's patches to its own table before that plan's forward, so the table a
running forward reads never changes under it.

All arrays are int32, one-dimensional and frozen once the plan exists.
"""

from enum import StrEnum

import msgspec
import numpy as np
from msgspec import Struct

from drumline.contract.arrays import NO_INTS, IntArray, decode_array, encode_array
from drumline.contract.cache import BlockMoves, CacheOp
from drumline.contract.storage import StorageOp


class Bound(Struct, frozen=True):
    """From this plan on, pool row `row` serves `rid`; `generation` tells owners apart."""

    row: int
    generation: int
    rid: str


class TablePatch(Struct, frozen=True, eq=False):
    """Entries of one cache group's block table: `table[rows[i], columns[i]] = blocks[i]`."""

    group: int
    rows: IntArray
    columns: IntArray
    blocks: IntArray


class PageZeroes(Struct, frozen=True, eq=False):
    """Blocks of one group that a new owner gets blank."""

    group: int
    blocks: IntArray


class Batch(Struct, frozen=True, kw_only=True, eq=False):
    """The rows of one forward: prefill rows first, then decode rows.

    `rows`, `generations`, `input_lengths` and `prefix_lengths` have one entry a
    row. Row `rows[i]` feeds `input_lengths[i]` tokens at positions
    `prefix_lengths[i] …`; `prefix_lengths[i]` tokens of it are in the cache.
    The first `extends` rows feed prompt tokens, which lie back to back in
    `extend_ids`; `prompt_lengths` has those rows' prompt lengths, and `next_ids` the prompt
    token behind each chunk, -1 behind the last. A prefill row samples only when its chunk
    reaches its prompt's end.
    Every other row feeds the token it sampled last, which the data plane holds,
    unless `decode_ids` (one entry a decode row) names another, i.e. is not -1.
    """

    rows: IntArray
    generations: IntArray
    input_lengths: IntArray
    prefix_lengths: IntArray
    extends: int = 0
    extend_ids: IntArray = NO_INTS
    prompt_lengths: IntArray = NO_INTS
    next_ids: IntArray = NO_INTS
    decode_ids: IntArray | None = None

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def shifted_ids(self) -> IntArray:
        """Of each of `extend_ids`, the prompt token behind it, -1 behind a prompt's last."""
        shifted = np.roll(self.extend_ids, -1)
        shifted[np.cumsum(self.input_lengths[: self.extends]) - 1] = self.next_ids
        return shifted

    @property
    def tokens(self) -> int:
        """Tokens the forward feeds; a batch of none is no work."""
        return int(self.input_lengths.sum())


class RemotePrefill(Struct, frozen=True, kw_only=True, eq=False):
    """A prompt whose cache a prefill engine is to write into this row's blocks.

    `tables[g]` is the row's block table in group g from its first column on, null where
    nothing is to be had: a block a column, and of a state group the block of what is
    carried behind the prompt. The first `cached_tokens` are here already.
    """

    row: int
    generation: int
    rid: str
    cached_tokens: int
    prompt_tokens: int
    tables: tuple[IntArray, ...]


class RemoteDecode(Struct, frozen=True, kw_only=True, eq=False):
    """A computed prompt that a decode engine takes over, with the first token of its answer.

    `tables` is as in `RemotePrefill`; its blocks stay as they are until the transfer ends.
    """

    row: int
    generation: int
    rid: str
    prompt_tokens: int
    token: int
    tables: tuple[IntArray, ...]


class AbortReason(StrEnum):
    """Why a plan ended a request by itself."""

    IMAGE_DOES_NOT_FIT = "image_does_not_fit"
    OUT_OF_PAGES = "out_of_pages"
    LOAD_FAILED = "load_failed"
    """Pages of its prompt could not be copied from the host tier."""


class PlanAbort(Struct, frozen=True):
    """A request the planning itself ended; nothing further is emitted for it."""

    rid: str
    reason: AbortReason
    detail: str


class Plan(Struct, frozen=True, kw_only=True, eq=False):
    """One round's decisions.

    The data plane carries its parts out in this order, which same-round reuse of blocks
    relies on: the cache operations toward the host, copies, zeroes, the cache operations
    toward the device, patches and bindings, the remote streams, then the batch. A peer's
    writes are ordered with nothing of the device's: it may begin once zeroes are done.
    Storage operations touch host memory alone and start at once, apart from all that.
    """

    round: int
    batch: Batch | None = None
    bound: tuple[Bound, ...] = ()
    patches: tuple[TablePatch, ...] = ()
    zeroes: tuple[PageZeroes, ...] = ()
    copies: tuple[BlockMoves, ...] = ()
    """Device blocks onto others. No source is the target of an earlier one, so they may be
    done in order or all at once."""
    aborts: tuple[PlanAbort, ...] = ()
    cache_ops: tuple[CacheOp, ...] = ()
    storage_ops: tuple[StorageOp, ...] = ()
    remote_prefills: tuple[RemotePrefill, ...] = ()
    remote_decodes: tuple[RemoteDecode, ...] = ()

    @property
    def needs_device(self) -> bool:
        """Whether the data plane must see this plan at all."""
        return bool(
            self.batch
            or self.bound
            or self.patches
            or self.zeroes
            or self.copies
            or self.cache_ops
            or self.remote_prefills
            or self.remote_decodes
        )


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_decoder = msgspec.msgpack.Decoder(Plan, dec_hook=decode_array)


def encode_plan(plan: Plan) -> bytes:
    """Encode a plan, its arrays as raw int32 bytes."""
    return _encoder.encode(plan)


def decode_plan(data: bytes) -> Plan:
    """Decode what `encode_plan` made. Raises msgspec.DecodeError or ValidationError."""
    return _decoder.decode(data)

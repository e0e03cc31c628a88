"""Cache operations: what a plan moves between the device and host memory, and their ends.

Every operation has an id, counted from 0 over all kinds, and is acknowledged once.
Device blocks are numbered as in block tables; host blocks and snapshot blocks are
slots of their own pools, numbered from 1.
"""

from msgspec import Struct

from drumline.contract.arrays import IntArray


class BlockMoves(Struct, frozen=True, eq=False):
    """Blocks of one cache group: `sources[i]` is copied onto `targets[i]`."""

    group: int
    sources: IntArray
    targets: IntArray


class WriteBack(Struct, frozen=True, tag="write_back", eq=False):
    """Device blocks to the host pool.

    `pinned` sources stay as they are until the acknowledgment, so their copy orders
    nothing. Sources that are not pinned may be given away by the same plan: their bytes
    must be read before anything else of it runs.
    """

    op_id: int
    moves: tuple[BlockMoves, ...]
    pinned: bool


class LoadBack(Struct, frozen=True, tag="load_back", eq=False):
    """Host blocks to the device, for a prefix that this plan's forward reads."""

    op_id: int
    moves: tuple[BlockMoves, ...]


class Snapshot(Struct, frozen=True, tag="snapshot", eq=False):
    """What a suspended request has beyond the host pool: blocks to the snapshot pool, and the
    data plane's state of its row to blob slot `slot`. Its sources are not pinned."""

    op_id: int
    rid: str
    row: int
    slot: int
    moves: tuple[BlockMoves, ...]


class Restore(Struct, frozen=True, tag="restore", eq=False):
    """A suspended request's way back: blocks of both host pools, and the state of blob slot
    `slot` to its new row. The request is in no batch until the acknowledgment."""

    op_id: int
    rid: str
    row: int
    slot: int
    from_host: tuple[BlockMoves, ...] = ()
    from_snapshot: tuple[BlockMoves, ...] = ()


CacheOp = WriteBack | LoadBack | Snapshot | Restore


class CacheAck(Struct, frozen=True):
    """An operation is done; `ok` is False where it failed and moved nothing that counts."""

    op_id: int
    ok: bool = True

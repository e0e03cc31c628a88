"""Storage operations: what a plan asks of the storage tier behind host memory, and the answers.

The tier's workers read and write host blocks alone, numbered as in cache operations.
Every operation has an id, counted from 1 over all kinds and apart from those of cache
operations, and is answered once it can touch nothing any more.
"""

from msgspec import Struct


class StorageKey(Struct, frozen=True, gc=False):
    """An object: of the page that `digest` names, one block of one cache group."""

    group: int
    digest: bytes
    part: int = 0
    """Which of the group's blocks of the page."""


class StorageQuery(Struct, frozen=True, tag="query"):
    """Which of these objects are there?"""

    op_id: int
    keys: tuple[StorageKey, ...]


class StorageGet(Struct, frozen=True, tag="get"):
    """Objects to host blocks: `keys[i]` to block `blocks[i]` of its group."""

    op_id: int
    keys: tuple[StorageKey, ...]
    blocks: tuple[int, ...]


class StoragePut(Struct, frozen=True, tag="put"):
    """Host blocks to objects: block `blocks[i]` of its group to `keys[i]`."""

    op_id: int
    keys: tuple[StorageKey, ...]
    blocks: tuple[int, ...]


class StorageCancel(Struct, frozen=True, tag="cancel"):
    """Nobody wants the answer of operation `op_id` any more; it is still to be answered."""

    op_id: int


StorageOp = StorageQuery | StorageGet | StoragePut | StorageCancel


class StoragePressure(Struct, frozen=True):
    """How far behind the storage tier is; of several members, the worst of each."""

    queued_operations: int = 0
    queued_bytes: int = 0
    oldest_operation_us: int = 0


class StorageDone(Struct, frozen=True, kw_only=True):
    """What became of an operation, as all owners of its objects agree.

    `success[i]` says whether `keys[i]` was there, was read or is stored now. Where `failed`
    is not empty, `failed[i]` says that the object itself is bad. `retired` is False where
    it is not proven that no worker will touch the blocks any more.
    """

    op_id: int
    success: tuple[bool, ...]
    retired: bool = True
    failed: tuple[bool, ...] = ()

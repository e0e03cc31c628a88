"""Host pages on their way to storage.

A page becomes a candidate when its copy to host memory is done, and goes to storage
some plans later, a bounded operation a plan. A candidate holds nothing: one whose block is
gone by then is dropped. What was computed while a load from host memory was under way may
be unsound until that load is acknowledged, and is not stored before.
"""

from collections.abc import Sequence

import numpy as np

from drumline.contract.storage import StorageDone, StorageKey
from drumline.scheduler.config import StorageLimits
from drumline.scheduler.draft import Draft
from drumline.scheduler.host import HostTier
from drumline.scheduler.index import IndexArray
from drumline.scheduler.loads import Loads
from drumline.scheduler.storage.objects import KnownObjects
from drumline.scheduler.storage.operations import Operations


class Backups:
    """Candidates for storage, oldest first."""

    __slots__ = (
        "_host",
        "_known",
        "_limits",
        "_loads",
        "_operations",
        "_waiting",
        "disabled",
        "overflowed",
        "pressed",
        "unavailable",
    )

    def __init__(
        self,
        limits: StorageLimits,
        host: HostTier,
        loads: Loads,
        operations: Operations,
        known: KnownObjects,
    ) -> None:
        self._limits = limits
        self._host = host
        self._loads = loads
        self._operations = operations
        self._known = known
        self._waiting: dict[StorageKey, int] = {}
        self.disabled = self.overflowed = self.pressed = self.unavailable = 0
        """Candidates that were dropped, by why."""

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, digests: Sequence[bytes], blocks: Sequence[IndexArray], op_id: int) -> None:
        """Take pages that cache operation `op_id` has copied to host memory.

        `blocks[g]` has shape [pages, slots of group g], and 0 where nothing was copied.
        """
        for group, part in enumerate(blocks):
            for page, slot in zip(*(line.tolist() for line in np.nonzero(part)), strict=True):
                key = StorageKey(group, digests[page], slot)
                if self._known.stored(key):
                    continue
                if self._limits.max_operations == 1:
                    self.disabled += 1  # queries alone would never leave a place for it
                elif len(self._waiting) >= self._limits.max_known_objects:
                    self.overflowed += 1
                else:
                    self._waiting.pop(key, None)
                    self._waiting[key] = op_id

    def plan(self, spare: int, *, pressed: bool, draft: Draft) -> None:
        """Plan one operation for the oldest candidates, on `spare` host blocks at most.

        Where storage is `pressed`, all are dropped.
        """
        if pressed:
            self.pressed += len(self._waiting)
            self._waiting.clear()
            return
        limits, operations = self._limits, self._operations
        if operations.puts >= limits.max_operations // 2:
            return
        if len(operations) >= limits.max_operations:
            return
        room = min(
            limits.max_keys_per_operation,
            limits.max_host_blocks // 2 - operations.held_by_puts,
            spare,
        )
        keys: list[StorageKey] = []
        blocks: list[int] = []
        sound = self._loads.oldest
        while self._waiting and len(keys) < room:
            key, op_id = next(iter(self._waiting.items()))
            if op_id > sound:
                break
            del self._waiting[key]
            if self._known.stored(key):
                continue
            block = self._host.block(key.digest, key.group, key.part)
            if not block:
                self.unavailable += 1
                continue
            keys.append(key)
            blocks.append(block)
        if keys:
            held = np.array(blocks, np.intp)
            self._host.pool.hold(held)
            asked = tuple(keys)
            operations.put(asked, held, lambda _blocks, done: self._stored(asked, done), draft)

    def _stored(self, keys: tuple[StorageKey, ...], done: StorageDone) -> None:
        for key, success in zip(keys, done.success, strict=True):
            if success:
                self._known.learn(key, stored=True)

    def clear(self) -> None:
        """Drop all candidates: what they are of is cached no more."""
        self._waiting.clear()

"""The parents of a pool: which are free, and which group has cut which of them into blocks.

Parents are numbered from 1; 0 is the null page. A group that packs k blocks into a parent
owns it from the first of them that is out to the last, and fills it before it cuts
another one. Blocks go by their group's own page ids: page p of a group of k a parent is in
parent (p - 1) // k + 1. Who holds a block, and what is in it, others know.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from drumline.core.errors import InvariantError
from drumline.scheduler.index import IndexArray


class FreeList:
    """Parent ids, first in first out, in a ring that is never reallocated."""

    __slots__ = ("_count", "_head", "_ring")

    def __init__(self, capacity: int) -> None:
        self._ring = np.arange(1, capacity + 1)
        self._head = 0
        self._count = capacity

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> IndexArray:
        """Remove and return the `count` ids that are free the longest."""
        head, size = self._head, len(self._ring)
        end = head + count
        if end <= size:
            taken = self._ring[head:end].copy()
        else:
            taken = np.concatenate((self._ring[head:], self._ring[: end - size]))
        self._head = end % size
        self._count -= count
        return taken

    def take_one(self) -> int:
        """Remove and return the id that is free the longest."""
        head = self._head
        self._head = head + 1 if head + 1 < len(self._ring) else 0
        self._count -= 1
        return self._ring.item(head)

    def put(self, ids: IndexArray) -> None:
        """Append `ids`."""
        size, count = len(self._ring), len(ids)
        start = (self._head + self._count) % size
        first = min(count, size - start)
        self._ring[start : start + first] = ids[:first]
        self._ring[: count - first] = ids[first:]
        self._count += count

    def ids(self) -> IndexArray:
        """Return a copy of what is free, the longest free first."""
        return np.roll(self._ring, -self._head)[: self._count]


class Parents:
    """Parents 1 … count-1, and what the groups have cut from them."""

    __slots__ = ("_mask", "_owner", "_partial", "_plain", "free", "loose", "packing", "used")

    def __init__(self, packing: Sequence[int], count: int) -> None:
        """`packing[g]` is how many blocks group g cuts a parent into."""
        self.packing = list(packing)
        self._plain = all(blocks == 1 for blocks in packing)
        self.free = FreeList(count - 1)
        self.loose = [0] * len(self.packing)
        """Free blocks of each group inside parents that it owns."""
        # Of packed groups only: a parent's owner, how many of its blocks are out, which
        # are not (bits), and the group's parents with room, by blocks out.
        self._owner = [-1] * count
        self.used = [0] * count
        self._mask = [0] * count
        self._partial: list[list[list[int]]] = [[[] for _ in range(k)] for k in self.packing]

    def fits(self, needs: Sequence[int]) -> bool:
        """Whether there are `needs[g]` free blocks for every group together."""
        if self._plain:
            return sum(needs) <= len(self.free)
        return _fits(needs, self.packing, self.loose, len(self.free))

    def take(self, group: int, count: int) -> IndexArray:
        """Take `count` blocks of a group and return their pages. `fits` must have said yes."""
        if self.packing[group] == 1:
            return self.free.take(count)
        return np.array([self._take_packed(group) for _ in range(count)], np.intp)

    def take_each(self, counts: Sequence[int]) -> IndexArray:
        """Take `counts[g]` blocks of the first groups and return their pages, group by group.

        `fits` must have said yes.
        """
        if self._plain:
            return self.free.take(sum(counts))
        return np.concatenate([self.take(group, count) for group, count in enumerate(counts)])

    def take_one(self, group: int) -> int:
        """Take one block of a group and return its page. `fits` must have said yes."""
        if self.packing[group] == 1:
            return self.free.take_one()
        return self._take_packed(group)

    def put(self, group: int, pages: IndexArray) -> None:
        """Give blocks of a group back."""
        if self.packing[group] == 1:
            self.free.put(pages)
            return
        for page in pages.tolist():
            self._put_packed(group, page)

    def _take_packed(self, group: int) -> int:
        partial, packing = self._partial[group], self.packing[group]
        for used in range(packing - 1, 0, -1):
            if partial[used]:
                parent = partial[used].pop(0)
                self.loose[group] -= 1
                break
        else:
            parent = self.free.take_one()
            used = 0
            self._owner[parent] = group
            self._mask[parent] = (1 << packing) - 1
            self.loose[group] += packing - 1
        mask = self._mask[parent]
        slot = (mask & -mask).bit_length() - 1
        self._mask[parent] = mask & (mask - 1)
        self.used[parent] = used + 1
        if used + 1 < packing:
            insort(partial[used + 1], parent)
        return (parent - 1) * packing + slot + 1

    def _put_packed(self, group: int, page: int) -> None:
        partial, packing = self._partial[group], self.packing[group]
        parent, slot = divmod(page - 1, packing)
        parent += 1
        used = self.used[parent]
        if used < packing:
            partial[used].pop(bisect_left(partial[used], parent))
        self.used[parent] = used - 1
        self._mask[parent] |= 1 << slot
        if used > 1:
            insort(partial[used - 1], parent)
            self.loose[group] += 1
        else:
            self._owner[parent] = -1
            self.loose[group] -= packing - 1
            self.free.put(np.array([parent]))

    def check(self, group: int, out: IndexArray) -> None:
        """Raise InvariantError unless exactly the pages `out` of a packed group are taken."""
        packing = self.packing[group]
        counts = np.bincount((out - 1) // packing + 1, minlength=len(self.used)).tolist()
        for parent, count in enumerate(counts):
            if count == 0:
                if self._owner[parent] == group:
                    raise InvariantError(f"parent {parent} is empty and has an owner")
                continue
            listed = count == packing or parent in self._partial[group][count]
            if self._owner[parent] != group or self.used[parent] != count or not listed:
                raise InvariantError(f"parent {parent} of group {group} is not accounted for")
        loose = sum(packing - count for count in counts if count)
        if loose != self.loose[group]:
            raise InvariantError(f"group {group} counts {self.loose[group]} loose, has {loose}")


class Trial:
    """What would be free if some blocks were given up, without giving them up."""

    __slots__ = ("_free", "_loose", "_needs", "_parents", "_used")

    def __init__(self, parents: Parents, needs: Sequence[int]) -> None:
        self._parents = parents
        self._needs = needs
        self._free = len(parents.free)
        self._loose = list(parents.loose)
        self._used: dict[int, int] = {}

    def fits(self) -> bool:
        """Whether the needs fit."""
        return _fits(self._needs, self._parents.packing, self._loose, self._free)

    def give_up(self, group: int, page: int) -> None:
        self._move(group, page, -1)

    def spare(self, group: int, page: int) -> bool:
        """Take a page back if the needs still fit then."""
        self._move(group, page, 1)
        if self.fits():
            return True
        self._move(group, page, -1)
        return False

    def _move(self, group: int, page: int, step: int) -> None:
        packing = self._parents.packing[group]
        parent = (page - 1) // packing + 1
        if packing == 1:
            self._free -= step
            return
        used = self._used.get(parent)
        if used is None:
            used = self._parents.used[parent]
        self._used[parent] = used + step
        self._loose[group] -= step
        if used + step == 0:  # the parent empties: its other blocks are no longer the group's
            self._loose[group] -= packing
            self._free += 1
        elif used == 0:
            self._loose[group] += packing
            self._free -= 1


def _fits(
    needs: Sequence[int], packing: Sequence[int], loose: Sequence[int], free_parents: int
) -> bool:
    """Whether `needs[g]` blocks of every group are in what is loose and in free parents."""
    parents = 0
    for need, have, blocks in zip(needs, loose, packing, strict=True):
        if need > have:
            parents += -((have - need) // blocks)
    return parents <= free_parents

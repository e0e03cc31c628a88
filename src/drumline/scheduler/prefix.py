"""What is cached of which prefix: boundaries by digest, and the blocks each group has there.

A boundary is a position in a token sequence that a chained digest names. It has
room for the blocks that every group keeps of the page before it, so that one look
at the digest answers for all groups, and which blocks a run of boundaries has is
one array look-up. A boundary lives as long as it has a block. It knows nothing of
requests.
"""

from collections.abc import Sequence

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.core.errors import InvariantError
from drumline.scheduler.blocks import BlockPool

_FIRST_CAPACITY = 1024
_STRIDE = 256
"""Digests looked up at a time, so that a miss early in a long prompt ends the look."""


class PrefixIndex:
    """Boundaries of cached prefixes.

    `blocks[g][node, slot]` is the block of group g that holds the slot-th part of the
    page before boundary `node`, or 0. `slots[g]` is how many parts a page has.
    """

    __slots__ = ("_digests", "_filled", "_free", "_nodes", "_owner", "blocks", "end", "slots")

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = list(slots)
        self.blocks: list[IntArray] = [
            np.zeros((_FIRST_CAPACITY, count), np.int32) for count in slots
        ]
        self.end: IntArray = np.zeros(_FIRST_CAPACITY, np.int32)
        """Tokens from the start of the sequence to the boundary."""
        self._filled: IntArray = np.zeros(_FIRST_CAPACITY, np.int32)
        self._digests: list[bytes] = [b""] * _FIRST_CAPACITY
        self._nodes: dict[bytes, int] = {}
        self._free = list(range(_FIRST_CAPACITY - 1, 0, -1))
        self._owner: IntArray = np.zeros(0, np.int32)

    def watch(self, pool: BlockPool) -> None:
        """Learn how many blocks there are."""
        self._owner = np.zeros(len(pool.refs), np.int32)

    def __len__(self) -> int:
        return len(self._nodes)

    def known(self, digests: Sequence[bytes]) -> list[int]:
        """Return the boundaries of the leading digests that are known."""
        get = self._nodes.get
        nodes: list[int] = []
        for start in range(0, len(digests), _STRIDE):
            found = list(map(get, digests[start : start + _STRIDE]))
            if None in found:
                nodes += found[: found.index(None)]  # type: ignore[arg-type] # none before it
                break
            nodes += found  # type: ignore[arg-type] # none is None
        return nodes

    def find(self, digest: bytes) -> int:
        """Return the boundary of `digest`, or 0."""
        return self._nodes.get(digest, 0)

    def add(self, digests: Sequence[bytes], ends: IntArray) -> IntArray:
        """Return the boundaries of `digests`, in order; unknown ones are made."""
        nodes = self._nodes
        found = [nodes.get(digest, 0) for digest in digests]
        if 0 in found:
            missing = [at for at, node in enumerate(found) if not node]
            if len(missing) > len(self._free):
                self._grow(len(missing))
            for at in missing:
                digest = digests[at]
                node = nodes.get(digest, 0)
                if not node:
                    node = self._free.pop()
                    nodes[digest] = node
                    self._digests[node] = digest
                found[at] = node
        result = np.array(found, np.int32)
        self.end[result] = ends
        return result

    def offer(self, pool: BlockPool, group: int, nodes: IntArray, blocks: IntArray) -> None:
        """Cache the group's held `blocks`, a row a boundary, where the boundary has none.

        A block that the boundary has already stays the canonical one, and the offered
        one stays its holder's alone.
        """
        mine = self.blocks[group]
        vacant = (mine[nodes] == 0) & (blocks > 0)
        if not vacant.any():
            return
        which, slot = np.nonzero(vacant)
        at = nodes[which]
        taken = blocks[which, slot]
        mine[at, slot] = taken
        np.add.at(self._filled, at, 1)
        self._owner[taken] = at
        pool.cache(taken, self.end[at])

    def forget(self, group: int, blocks: IntArray) -> None:
        """Drop the group's `blocks` from their boundaries; a boundary without blocks goes."""
        nodes = self._owner[blocks]
        self._owner[blocks] = 0
        mine = self.blocks[group]
        if mine.shape[1] == 1:
            mine[nodes, 0] = 0
        else:
            which, slot = np.nonzero(mine[nodes] == blocks[:, None])
            mine[nodes[which], slot] = 0
        np.subtract.at(self._filled, nodes, 1)
        for node in np.unique(nodes[self._filled[nodes] == 0]).tolist():
            del self._nodes[self._digests[node]]
            self._digests[node] = b""
            self._free.append(node)

    def _grow(self, wanted: int) -> None:
        old = len(self.end)
        new = max(2 * old, old + wanted)
        self.blocks = [
            np.concatenate((part, np.zeros((new - old, part.shape[1]), np.int32)))
            for part in self.blocks
        ]
        self.end = np.concatenate((self.end, np.zeros(new - old, np.int32)))
        self._filled = np.concatenate((self._filled, np.zeros(new - old, np.int32)))
        self._digests += [b""] * (new - old)
        self._free += range(new - 1, old - 1, -1)

    def check(self, pool: BlockPool) -> None:
        """Raise InvariantError unless boundaries and cached blocks name each other."""
        filled = np.zeros_like(self._filled)
        held = 0
        for part in self.blocks:
            nodes, _slots = np.nonzero(part)
            np.add.at(filled, nodes, 1)
            blocks = part[part > 0]
            held += len(blocks)
            if not np.array_equal(self._owner[blocks], nodes.astype(np.int32)):
                raise InvariantError("a cached block does not know its boundary")
        if not np.array_equal(filled, self._filled):
            raise InvariantError("a boundary counts blocks that it does not have")
        if held != len(pool.cached_blocks()):
            raise InvariantError("a block is cached without a boundary")
        live = sorted(self._nodes.values())
        if live != np.flatnonzero(filled).tolist():
            raise InvariantError("a boundary is known without blocks, or unknown with some")
        if len(live) + len(self._free) != len(self.end) - 1:
            raise InvariantError("a boundary is lost")

"""In which order cached blocks that nobody holds are given up.

Blocks wait under the epoch of the admission that touched them last, oldest epoch
first; within an epoch the deepest first, so that a prefix outlives what hangs on it. Filing
is cheap, as blocks are sorted into their buckets only when one is wanted, and never undone:
a block that somebody took since, or that was touched again, is stale where it was filed and
is skipped there. It knows blocks as numbers and asks others what they are.
"""

import heapq
from collections.abc import Callable

import numpy as np

from drumline.scheduler.index import NOBODY, ZERO, IndexArray


class EvictionOrder:
    """Blocks nobody holds, in the order they are given up.

    `live` returns which of the blocks filed under an epoch are not stale; of two that
    are, the one of the higher `depth` goes first.
    """

    __slots__ = ("_buckets", "_depth", "_filed", "_front", "_keys", "_live", "_pending")

    def __init__(
        self,
        depth: Callable[[IndexArray], IndexArray],
        live: Callable[[IndexArray, int], IndexArray],
    ) -> None:
        self._depth = depth
        self._live = live
        self._pending: list[tuple[IndexArray, IndexArray]] = []
        """Blocks and their epochs, not in the buckets yet."""
        self._buckets: dict[int, list[IndexArray]] = {}
        self._keys: list[int] = []
        self._filed = 0
        self._front = -1
        """The bucket that is in order, if it is one array."""

    def file(self, blocks: IndexArray, epochs: IndexArray, waiting: int) -> None:
        """File `blocks`; `waiting` is how many blocks in all are not stale."""
        self._pending.append((blocks, epochs))
        self._filed += len(blocks)
        if self._filed > 2 * waiting + 4096:
            self._compact()

    def _settle(self) -> None:
        """Put what was filed since the last time into buckets."""
        if not self._pending:
            return
        blocks, keys = map(np.concatenate, zip(*self._pending, strict=True))
        self._pending.clear()
        order = np.argsort(keys, kind="stable")
        blocks, keys = blocks[order], keys[order]
        starts = np.flatnonzero(keys[1:] != keys[:-1]) + 1
        firsts = keys[np.concatenate((ZERO[None], starts))].tolist()
        for key, part in zip(firsts, np.split(blocks, starts), strict=True):
            bucket = self._buckets.get(key)
            if bucket is None:
                self._buckets[key] = [part]
                heapq.heappush(self._keys, key)
            else:
                bucket.append(part)
            if key == self._front:
                self._front = -1

    def pop(self, count: int) -> IndexArray:
        """Remove and return the `count` blocks to give up first, or as many as there are."""
        self._settle()
        taken: list[IndexArray] = []
        while count and self._keys:
            key = self._keys[0]
            if self._front != key:
                self._buckets[key] = [self._sorted(key)]
                self._front = key
            bucket = self._buckets[key][0]
            at = max(len(bucket) - count, 0)
            chosen, rest = bucket[at:], bucket[:at]
            self._filed -= len(chosen)
            # It was in order when it was sorted; since then, some may have been taken.
            chosen = self._live(chosen, key)
            if len(rest):
                self._buckets[key] = [rest]
            else:
                heapq.heappop(self._keys)
                del self._buckets[key]
                self._front = -1
            taken.append(chosen[::-1])
            count -= len(chosen)
        if len(taken) == 1:
            return taken[0]
        return np.concatenate(taken) if taken else NOBODY

    def _sorted(self, key: int) -> IndexArray:
        """Return a bucket's blocks that are not stale, the last to go first."""
        parts = self._buckets[key]
        blocks = np.unique(np.concatenate(parts))
        live = self._live(blocks, key)
        self._filed -= sum(map(len, parts)) - len(live)
        return live[np.argsort(self._depth(live), kind="stable")]

    def _compact(self) -> None:
        self._settle()
        self._front = -1
        for key in list(self._buckets):
            live = self._sorted(key)
            if len(live):
                self._buckets[key] = [live]
            else:
                del self._buckets[key]
        self._keys = list(self._buckets)
        heapq.heapify(self._keys)

    def clear(self) -> None:
        self._pending.clear()
        self._buckets.clear()
        self._keys.clear()
        self._filed = 0
        self._front = -1

    def waiting(self) -> IndexArray:
        """Return every block that is not stale, each once, the oldest buckets first.

        When blocks were put into buckets, and so the buckets' order, is nobody's business:
        peers that were asked more or less often answer the same.
        """
        self._settle()
        parts = [
            self._live(np.unique(np.concatenate(self._buckets[key])), key)
            for key in sorted(self._buckets)
        ]
        return np.concatenate(parts) if parts else NOBODY

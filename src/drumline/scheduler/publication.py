"""When a request's pages become findable.

Prompt pages are offered to the index in the plan after the one that computes them,
pages that decoding completes in the first plan after both their tokens and their
cache rows are settled. What a request computes now is promised meanwhile, so that
others can wait for it in place of computing it too.
"""

from collections.abc import Sequence

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.core.hashing import next_digests
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.prefix import PrefixIndex
from drumline.scheduler.requests import Request
from drumline.scheduler.rows import Rows
from drumline.scheduler.tables import BlockTables


class Publication:
    """Offers pages to the prefix index."""

    __slots__ = ("_granularity", "_index", "_pool", "_promised", "_rows", "_tables")

    def __init__(
        self,
        granularity: int,
        index: PrefixIndex,
        pool: BlockPool,
        tables: BlockTables,
        rows: Rows,
    ) -> None:
        self._granularity = granularity
        self._index = index
        self._pool = pool
        self._tables = tables
        self._rows = rows
        self._promised: dict[bytes, int] = {}

    # -- promises -----------------------------------------------------------------

    def promise(self, request: Request) -> None:
        """Say that `request` will compute its prompt's pages that are not cached."""
        for digest in request.digests[request.published :]:
            self._promised.setdefault(digest, request.row)

    def promised(self, digest: bytes) -> bool:
        return digest in self._promised

    def withdraw(self, request: Request) -> None:
        """Forget what `request` promised and did not publish."""
        for digest in request.digests[request.published :]:
            if self._promised.get(digest) == request.row:
                del self._promised[digest]

    # -- prompts ------------------------------------------------------------------

    def publish_prompt(self, request: Request, tokens: int) -> None:
        """Offer the prompt's full pages within its first `tokens` tokens."""
        first, last = request.published, tokens // self._granularity
        if last <= first:
            return
        digests = request.digests[first:last]
        for digest in digests:
            if self._promised.get(digest) == request.row:
                del self._promised[digest]
        request.published = last
        size = self._granularity
        ends = np.arange((first + 1) * size, (last + 1) * size, size, dtype=np.int32)
        nodes = self._index.add(digests, ends)
        for group, slots in enumerate(self._index.slots):
            blocks = self._tables.blocks(group, request.row, first * slots, last * slots)
            self._index.offer(self._pool, group, nodes, blocks.reshape(-1, slots))

    # -- answers ------------------------------------------------------------------

    def publish_decoded(self, rows: IntArray) -> None:
        """Offer the pages that `rows` have completed since they were last asked."""
        fields, size = self._rows, self._granularity
        while True:
            settled = np.minimum(fields.computed[rows], fields.known[rows])
            rows = rows[settled >= fields.hashed[rows] + size]
            if not len(rows):
                return
            hashed = fields.hashed[rows]
            pages = fields.recent.reshape(len(fields.owners), -1, size)
            tokens = pages[rows, hashed // size % pages.shape[1]]
            owners = rows.tolist()
            digests = next_digests(
                [fields.digests[row] for row in owners], tokens, self._extras(owners)
            )
            for row, digest in zip(owners, digests, strict=True):
                fields.digests[row] = digest
            fields.hashed[rows] = hashed + size
            self._offer(rows, hashed // size, digests)

    def _extras(self, rows: Sequence[int]) -> list[bytes]:
        owners = self._rows.owners
        return [owner.extra for row in rows if (owner := owners[row]) is not None]

    def _offer(self, rows: IntArray, pages: IntArray, digests: list[bytes]) -> None:
        nodes = self._index.add(digests, (pages + 1) * np.int32(self._granularity))
        for group, slots in enumerate(self._index.slots):
            columns = pages[:, None] * slots + np.arange(slots)
            blocks = self._tables.table[group][rows[:, None], columns]
            self._index.offer(self._pool, group, nodes, blocks)

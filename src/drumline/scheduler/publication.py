"""When a request's pages become findable.

Prompt pages are offered to the index in the plan after the one that computes them,
pages that decoding completes in the first plan after both their tokens and their
cache rows are settled. What a request computes now is promised meanwhile, so that
others can wait for it in place of computing it too.
"""

import numpy as np

from drumline.core.hashing import next_digests
from drumline.scheduler.index import IndexArray
from drumline.scheduler.prefix import PrefixIndex
from drumline.scheduler.requests import Request
from drumline.scheduler.rows import Rows
from drumline.scheduler.tables import BlockTables


class Publication:
    """Offers pages to the prefix index."""

    __slots__ = ("_index", "_page", "_parts", "_promised", "_rows", "_size", "_tables", "_views")

    def __init__(
        self, granularity: int, index: PrefixIndex, tables: BlockTables, rows: Rows
    ) -> None:
        self._size = granularity
        self._page: IndexArray = np.array(granularity)
        self._index = index
        self._tables = tables
        self._rows = rows
        self._parts = [np.arange(slots) for slots in index.slots]
        # The newest tokens' first page, and what is behind it.
        self._views = (
            rows.newest[:, :granularity],
            rows.newest[:, granularity:],
            rows.newest[:, : rows.newest.shape[1] - granularity],
        )
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
        first, last = request.published, tokens // self._size
        if last <= first:
            return
        digests = request.digests[first:last]
        if self._promised:
            for digest in digests:
                if self._promised.get(digest) == request.row:
                    del self._promised[digest]
        request.published = last
        self._index.publish(
            digests,
            np.arange(first + 1, last + 1) * self._size,
            [
                table[request.row, first * slots : last * slots].reshape(-1, slots)
                for table, slots in zip(self._tables.table, self._index.slots, strict=True)
            ],
        )

    # -- answers ------------------------------------------------------------------

    def publish_decoded(self, rows: IndexArray) -> None:
        """Offer the pages that `rows` have completed since they were last asked."""
        fields = self._rows
        while True:
            known = fields.known[rows]
            ends = fields.hashed[rows] + self._page
            done = np.minimum(fields.computed[rows], known) >= ends
            count = np.count_nonzero(done)
            if not count:
                return
            if count < len(rows):
                rows, known, ends = rows[done], known[done], ends[done]
            digests = self._chain(rows)
            fields.hashed[rows] = ends
            if np.count_nonzero(known > ends):
                _page, behind, front = self._views
                front[rows] = behind[rows]
            fields.origin[rows] -= self._page
            self._index.publish(digests, ends, self._blocks(rows, ends))
            if not np.count_nonzero(known - ends >= self._page):
                return

    def _chain(self, rows: IndexArray) -> list[bytes]:
        """Return the digests of the rows' next pages, and keep them as the rows' last."""
        digests, extras = self._rows.digests, self._rows.extras
        owners = rows.tolist()
        chained = next_digests(
            [digests[row] for row in owners],
            self._views[0][rows],
            [extras[row] for row in owners],
        )
        for row, digest in zip(owners, chained, strict=True):
            digests[row] = digest
        return chained

    def _blocks(self, rows: IndexArray, ends: IndexArray) -> list[IndexArray]:
        """Return each group's blocks of the pages that end at `ends`, a row a page."""
        blocks: list[IndexArray] = []
        for group, tokens in enumerate(self._tables.block_tokens):
            parts = self._parts[group]
            cells = self._tables.cells(group, rows, ends // tokens - len(parts))
            if len(parts) == 1:
                blocks.append(self._tables.flat[group][cells].reshape(-1, 1))
            else:
                blocks.append(self._tables.flat[group][cells.reshape(-1, 1) + parts])
        return blocks

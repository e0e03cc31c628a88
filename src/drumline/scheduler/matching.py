"""How much of a prompt is cached: the deepest boundary that every group supports.

A full-attention group supports a boundary when it has every block before it; a
window group when it has the blocks that a token at the boundary still looks back
on. The joint match is the deepest boundary that all support: a full page's end, or
the end of a tail behind one.
"""

import numpy as np

from drumline.core.hashing import page_digest
from drumline.scheduler.index import IndexArray
from drumline.scheduler.match import NO_MATCH, Match
from drumline.scheduler.prefix import PrefixIndex
from drumline.scheduler.requests import Request
from drumline.scheduler.tables import BlockTables


class Matcher:
    """Looks prompts up in the prefix index."""

    __slots__ = ("_index", "_page", "_tables")

    def __init__(self, page_tokens: int, index: PrefixIndex, tables: BlockTables) -> None:
        self._page = page_tokens
        self._index = index
        self._tables = tables

    def match(self, request: Request, cap: int, *, tails: bool = True) -> Match:
        """Return what is cached of the first `cap` tokens of a prompt, in `tails` or pages."""
        index, tables = self._index, self._tables
        digests = request.digests[: cap // self._page]
        # Without a group that keeps all, early boundaries may be gone and later ones not.
        look = index.known if None in tables.windows else index.anywhere
        nodes = np.array(look(digests), np.intp)
        cells = [blocks[nodes].reshape(-1) for blocks in index.blocks]
        reach = len(nodes)
        for group, slots in enumerate(index.slots):
            if tables.windows[group] is None:
                present = cells[group][: reach * slots] > 0
                if np.count_nonzero(present) < len(present):
                    reach = int(np.argmin(present)) // slots
        for pages in self._candidates(reach):
            tail = self._tail(request, pages, cap, cells) if tails else None
            if tail is not None:
                return self._found(pages, tail[1], reach, cells, tail[0])
            if pages == 0 or self._supports(cells, pages * self._page, pages):
                return self._found(pages, pages * self._page, reach, cells, 0)
        return NO_MATCH

    def _candidates(self, reach: int) -> range:
        """Return the page counts to try, the deepest first."""
        if all(window is None for window in self._tables.windows):
            return range(reach, reach - 1, -1)
        return range(reach, -1, -1)

    def _supports(self, cells: list[IndexArray], tokens: int, pages: int) -> bool:
        """Whether every window group has what a boundary at `tokens` looks back on in pages."""
        for group, slots in enumerate(self._index.slots):
            if self._tables.windows[group] is not None:
                first = self._tables.first_column(group, tokens)
                if not (cells[group][first : pages * slots] > 0).all():
                    return False
        return True

    def _tail(
        self, request: Request, pages: int, cap: int, cells: list[IndexArray]
    ) -> tuple[int, int] | None:
        """Return the longest tail cached behind `pages` pages: its boundary and its end."""
        start = pages * self._page
        prior = request.digests[pages - 1] if pages else b""
        for node, end in self._index.tails(prior or request.root):
            if end > cap or not self._supports(cells, end, pages):
                continue
            if not all((part > 0).all() for part in self._tail_blocks(node, start, end)):
                continue
            digest = page_digest(prior, request.tokens[start:end].tobytes(), request.extra)
            if self._index.find(digest) == node:
                return node, end
        return None

    def _tail_blocks(self, node: int, start: int, end: int) -> list[IndexArray]:
        """Return each group's blocks of a tail that a boundary at its end looks back on."""
        parts = []
        for group, size in enumerate(self._tables.block_tokens):
            first = max(self._tables.first_column(group, end) - start // size, 0)
            parts.append(self._index.blocks[group][node, first : -(-(end - start) // size)])
        return parts

    def _found(
        self, pages: int, tokens: int, reach: int, cells: list[IndexArray], node: int
    ) -> Match:
        hits = []
        for group, slots in enumerate(self._index.slots):
            hit = cells[group][: pages * slots]
            hit[: self._tables.first_column(group, tokens)] = 0
            hits.append(hit)
        tails = self._tail_blocks(node, pages * self._page, tokens) if node else []
        return Match(pages, tokens, reach * self._page, hits, tails)

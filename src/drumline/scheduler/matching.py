"""How much of a prompt is cached: the deepest boundary that every group supports.

A full-attention group supports a boundary when it has every block before it; a
window group when it has the blocks that a token at the boundary still looks back
on; a state group when it has what was carried up to it. The joint match is the deepest
boundary that all support: a full page's end, or the end of a tail behind one.
"""

import numpy as np
from msgspec import Struct, structs

from drumline.core.hashing import page_digest
from drumline.scheduler.index import NOBODY, ZERO, IndexArray, every
from drumline.scheduler.match import NO_MATCH, Match
from drumline.scheduler.prefix import PrefixIndex
from drumline.scheduler.requests import Request
from drumline.scheduler.tables import BlockTables

_STRIDE = 256
"""Digests looked up in two tiers at a time."""


class Matcher:
    """Looks prompts up in the prefix index."""

    __slots__ = ("_host", "_index", "_page", "_states", "_tables")

    def __init__(
        self, page_tokens: int, index: PrefixIndex, tables: BlockTables, host: PrefixIndex
    ) -> None:
        """`host` is the tier that has what the device's `index` lacks."""
        self._host = host
        self._page = page_tokens
        self._index = index
        self._tables = tables
        self._states = range(len(tables.windows), len(index.slots))
        """The groups behind those of `tables`: state groups."""

    def match(self, request: Request, cap: int, *, tails: bool = True, host: bool = True) -> Match:
        """Return what is cached of the first `cap` tokens of a prompt, in `tails` or pages.

        Without `host`, on the device alone.
        """
        index, tables = self._index, self._tables
        pages = min(cap // self._page, len(request.digests))
        if host and len(self._host):
            return self._match_tiers(request, request.digests[:pages], cap, tails)
        if None in tables.windows:
            nodes = index.known(request.digests, pages)
        else:  # early boundaries may be gone and later ones not
            nodes = index.anywhere(request.digests[:pages])
        cells = [blocks[nodes].reshape(-1) for blocks in index.blocks]
        return self._deepest(request, cap, cells, tails)

    def presence(self, digests: list[bytes]) -> list[IndexArray]:
        """Return a group's cell for each block of these pages, 0 where both tiers lack it."""
        nodes, lower = self._index.anywhere(digests), self._host.anywhere(digests)
        return [
            np.maximum(mine[nodes], theirs[lower]).reshape(-1)
            for mine, theirs in zip(self._index.blocks, self._host.blocks, strict=True)
        ]

    def deepest(self, request: Request, cells: list[IndexArray]) -> Match:
        """Return the deepest boundary of full pages that would match, had it these `cells`."""
        copies = [part.copy() for part in cells]
        return self._deepest(request, len(request.tokens), copies, tails=False)

    def has(self, digest: bytes, group: int, part: int) -> bool:
        """Whether either tier has one block of a page."""
        return any(
            index.blocks[group][index.find(digest), part] for index in (self._index, self._host)
        )

    def _match_tiers(self, request: Request, digests: list[bytes], cap: int, tails: bool) -> Match:
        """Return what is cached on the device or, where it is not there, in the host tier."""
        nodes, lower = self._look_in_both(digests)
        device = [blocks[nodes].reshape(-1) for blocks in self._index.blocks]
        host = [blocks[lower].reshape(-1) for blocks in self._host.blocks]
        either = [np.maximum(mine, theirs) for mine, theirs in zip(device, host, strict=True)]
        match = self._deepest(request, cap, either, tails)
        if not match.pages:
            return match  # of a tail, it says itself what is where
        blocks, loads = [], []
        for group, hit in enumerate(match.blocks):
            here = device[group][: len(hit)] > 0
            blocks.append(np.where(here, device[group][: len(hit)], 0))
            loads.append(np.where(here, 0, host[group][: len(hit)]))
            unread = self._unread(group, match.pages, match.tokens)
            blocks[group][:unread] = loads[group][:unread] = 0
        if not any(np.count_nonzero(part) for part in loads):
            loads = []
        return structs.replace(match, blocks=blocks, host=loads)

    def _look_in_both(self, digests: list[bytes]) -> tuple[IndexArray, IndexArray]:
        """Return both tiers' boundaries of `digests`, 0 where unknown.

        Where a group keeps all, no further than a page that neither tier knows.
        """
        nodes: list[IndexArray] = [NOBODY]
        lower: list[IndexArray] = [NOBODY]
        for start in range(0, len(digests), _STRIDE):
            part = digests[start : start + _STRIDE]
            nodes.append(self._index.anywhere(part))
            lower.append(self._host.anywhere(part))
            if None in self._tables.windows and not (nodes[-1][-1] or lower[-1][-1]):
                break
        return np.concatenate(nodes), np.concatenate(lower)

    def _deepest(self, request: Request, cap: int, cells: list[IndexArray], tails: bool) -> Match:
        """Return the match at the deepest boundary that the blocks in `cells` support."""
        index, tables = self._index, self._tables
        reach = len(cells[0]) // index.slots[0]
        for group, window in enumerate(tables.windows):
            if window is None:
                slots = index.slots[group]
                present = cells[group][: reach * slots] > ZERO
                if not every(present):
                    reach = int(np.argmin(present)) // slots
        paged = 0
        for pages in self._candidates(reach):
            tail = self._tail(request, pages, cap, cells) if tails else None
            if tail is not None:
                return self._found(pages, tail.end, (reach, paged or pages), cells, tail)
            if pages == 0 or self._supports(cells, pages * self._page, pages):
                paged = paged or pages
                if pages == 0 or all(cells[group][pages - 1] for group in self._states):
                    return self._found(pages, pages * self._page, (reach, paged), cells)
        return NO_MATCH

    def _candidates(self, reach: int) -> range:
        """Return the page counts to try, the deepest first."""
        if self._tables.windows.count(None) == len(self._index.slots):
            return range(reach, reach - 1, -1)
        return range(reach, -1, -1)

    def _supports(self, cells: list[IndexArray], tokens: int, pages: int) -> bool:
        """Whether every window group has what a boundary at `tokens` looks back on in pages."""
        for group, window in enumerate(self._tables.windows):
            if window is not None:
                first = self._tables.first_column(group, tokens)
                if not (cells[group][first : pages * self._index.slots[group]] > 0).all():
                    return False
        return True

    def _tail(
        self, request: Request, pages: int, cap: int, cells: list[IndexArray]
    ) -> "_Tail | None":
        """Return the longest tail cached behind `pages` pages, in either tier or both."""
        start = pages * self._page
        prior = request.digests[pages - 1] if pages else b""
        key = prior or request.root
        tails = self._index.tails(key) + self._host.tails(key)
        if not tails:
            return None
        for end in sorted({end for _node, end in tails}, reverse=True):
            if end > cap or not self._supports(cells, end, pages):
                continue
            digest = page_digest(prior, request.tokens[start:end].tobytes(), request.extra)
            here = self._tail_blocks(self._index, self._index.find(digest), start, end)
            if all(part.all() for part in here):
                return _Tail(end, here, [])
            there = self._tail_blocks(self._host, self._host.find(digest), start, end)
            there = [np.where(mine > 0, 0, part) for mine, part in zip(here, there, strict=True)]
            if all((mine + part).all() for mine, part in zip(here, there, strict=True)):
                return _Tail(end, here, there)
        return None

    def _tail_blocks(self, index: PrefixIndex, node: int, start: int, end: int) -> list[IndexArray]:
        """Return each group's blocks in `index` of a tail that a boundary at its end looks back on.

        They are 0 where it has none, as the boundary 0 has nothing.
        """
        parts = []
        for group, size in enumerate(self._tables.block_tokens):
            first = max(self._tables.first_column(group, end) - start // size, 0)
            parts.append(index.blocks[group][node, first : -(-(end - start) // size)])
        return parts + [index.blocks[group][node] for group in self._states]

    def _unread(self, group: int, pages: int, tokens: int) -> int:
        """Return the first of a group's blocks of `pages` that a boundary at `tokens` needs."""
        if group in self._states:
            return pages - 1 if tokens == pages * self._page else pages
        return self._tables.first_column(group, tokens)

    def _found(
        self,
        pages: int,
        tokens: int,
        reach: tuple[int, int],
        cells: list[IndexArray],
        tail: "_Tail | None" = None,
    ) -> Match:
        """Return the match at a boundary, behind `tail` if there is one; `reach` is in pages."""
        hits = []
        for group, slots in enumerate(self._index.slots):
            hit = cells[group][: pages * slots]
            unread = self._unread(group, pages, tokens)
            if unread > 0:
                hit[:unread] = 0
            hits.append(hit)
        full, paged = reach[0] * self._page, reach[1] * self._page
        if tail is None:
            return Match(pages, tokens, full, paged, hits, [])
        return Match(pages, tokens, full, paged, hits, tail.here, host_tails=tail.there)


class _Tail(Struct, frozen=True, eq=False):
    """A partial page that ends at `end`: its blocks on the device, and those the host tier has.

    `there` is empty where the device has all.
    """

    end: int
    here: list[IndexArray]
    there: list[IndexArray]

"""When a request's pages become findable.

A chunk's pages are offered when the request is planned next, or, where prefixes are
shared in flight, in the next plan whatever it plans; pages that decoding completes, in
the first decode after both their tokens and their cache rows are settled. The partial
page at the end, the tail, is offered with the first decode, which then continues on a
private copy, and when the request finishes. What a request computes now is promised
meanwhile, so that others can wait for it in place of computing it too.
"""

from collections.abc import Callable, Sequence

import numpy as np

from drumline.core.hashing import next_digests, page_digest
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.draft import Draft
from drumline.scheduler.index import IndexArray, every, scalar
from drumline.scheduler.kv_events import KvEvents
from drumline.scheduler.prefix import PrefixIndex
from drumline.scheduler.requests import Request
from drumline.scheduler.rows import Rows
from drumline.scheduler.states import StateSlots
from drumline.scheduler.tables import BlockTables

_COUNT_BYTES = 4
"""What comes before a page's tokens where they are hashed."""


class Publication:
    """Offers pages to the prefix index."""

    __slots__ = (
        "_events",
        "_index",
        "_offer",
        "_page",
        "_pool",
        "_promised",
        "_promoted",
        "_rows",
        "_size",
        "_states",
        "_tables",
    )

    def __init__(
        self,
        granularity: int,
        index: PrefixIndex,
        pool: BlockPool,
        tables: BlockTables,
        states: StateSlots,
        rows: Rows,
        events: KvEvents | None = None,
        offer: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        """`offer` learns of prompts' pages that were offered to the index."""
        self._offer = offer
        self._events = events
        self._pool = pool
        self._size = granularity
        self._page = scalar(granularity)
        self._index = index
        self._tables = tables
        self._states = states
        self._rows = rows
        self._promised: dict[bytes, int] = {}
        self._promoted: dict[bytes, int] = {}
        """Of promised pages, those at whose end windows and state groups will be cached too."""

    # -- promises -----------------------------------------------------------------

    def promise(self, request: Request) -> None:
        """Say that `request` will compute its prompt's pages that are not cached."""
        for digest in request.digests[request.published :]:
            self._promised.setdefault(digest, request.row)
        if request.promotion:
            promoted = request.digests[request.promotion // self._size - 1]
            self._promoted.setdefault(promoted, request.row)

    @property
    def promising(self) -> bool:
        """Whether anybody computes anything that others could wait for."""
        return bool(self._promised or self._promoted)

    def promised(self, digest: bytes) -> bool:
        return digest in self._promised

    def promoted(self, digest: bytes) -> bool:
        """Whether the end of a page is being promoted."""
        return digest in self._promoted

    def withdraw(self, request: Request) -> None:
        """Forget what `request` promised and did not publish."""
        for digest in request.digests[request.published :]:
            if self._promised.get(digest) == request.row:
                del self._promised[digest]
            if self._promoted.get(digest) == request.row:
                del self._promoted[digest]

    # -- prompts ------------------------------------------------------------------

    def publish_prompt(self, request: Request, tokens: int, draft: Draft | None) -> None:
        """Offer the prompt's full pages within its first `tokens` tokens.

        A page that is cached already is adopted in place of the request's own; without
        a draft, when the request ends, it keeps its own.
        """
        first, last = request.published, tokens // self._size
        if last <= first:
            return
        digests = request.digests[first:last]
        if self._promised:
            for digest in digests:
                if self._promised.get(digest) == request.row:
                    del self._promised[digest]
                if self._promoted.get(digest) == request.row:
                    del self._promoted[digest]
        request.published = last
        blocks: list[IndexArray] = []
        for group, table in enumerate(self._tables.table):
            slots = self._index.slots[group]
            own = table[request.row, first * slots : last * slots]
            blocks.append(self._looked_back_on(group, own, request.promotion, first, last))
        carried = [0] * len(self._states)
        if last * self._size in (request.promotion, request.prompt_tokens):
            carried = self._carried(request.row, last * self._size)
        for block in carried:
            blocks.append(np.zeros(last - first, np.intp))
            blocks[-1][-1] = block
        if self._events is not None:
            self._name_pages(self._events, request, first, last)
        ends = np.arange((first + 1) * self._size, (last + 1) * self._size, self._size)
        nodes = self._index.publish(digests, ends, blocks, chained=True)
        if self._offer is not None:
            self._offer(digests)
        if nodes is not None and draft is not None:
            self._adopt(np.full(len(nodes), request.row), ends, nodes, blocks, draft)
            if any(carried):
                self._adopt_carried(request.row, nodes[-1], draft)

    def _looked_back_on(
        self, group: int, own: IndexArray, promotion: int, first: int, last: int
    ) -> IndexArray:
        """Return of pages' blocks `own`, from page `first` on, those that are of use to others.

        Of a window group, they are those that the last boundary and a promoted one look back on.
        """
        slots, tables = self._index.slots[group], self._tables
        passed = tables.first_column(group, last * self._size) - first * slots
        if passed <= 0:
            return own
        own = own.copy()
        end = max(min(promotion // self._size * slots - first * slots, passed), 0)
        start = min(max(tables.first_column(group, promotion) - first * slots, 0), end)
        own[:start] = own[end:passed] = 0
        return own

    def _carried(self, row: int, tokens: int) -> list[int]:
        """Return what a row's state groups carry up to `tokens`, null where they are elsewhere."""
        if self._rows.computed_of[row] == tokens:
            return self._states.carried(row)
        return [0] * len(self._states)

    def _adopt_carried(self, row: int, node: int, draft: Draft) -> None:
        blocks = self._index.blocks[len(self._tables.table) :]
        self._states.adopt(row, [int(part[node, 0]) for part in blocks], draft)

    def name_loaded(self, request: Request, pages: int) -> None:
        """Say what the prompt's first pages hold, before some of them are cached again."""
        if self._events is not None:
            self._name_pages(self._events, request, 0, pages)

    def _name_pages(self, events: KvEvents, request: Request, first: int, last: int) -> None:
        """Say what the prompt's pages `first` to `last` hold."""
        prior = request.digests[first - 1] if first else b""
        for page in range(first, last):
            tokens = request.tokens[page * self._size : (page + 1) * self._size]
            events.name(prior, request.digests[page], tokens.tobytes(), request.extra)
            prior = request.digests[page]

    def publish_tail(self, request: Request, draft: Draft) -> None:
        """Offer the prompt's last, partial page, and move the request off its blocks.

        Without room for that, the page is not offered.
        """
        row, tokens = request.row, request.prompt_tokens
        if tokens % self._size == 0:
            return
        parts = [self._tables.partial(group, tokens) for group in range(len(self._tables.table))]
        # The row moves off what it publishes, to copies and to live blocks of state groups.
        needs = [last - first for first, last in parts]
        if not self._pool.make_room(needs + self._states.next_needs):
            return
        node, digest = self._offer_tail(request, tokens)
        if self._offer is not None:
            self._offer([digest])
        for group, (first, last) in enumerate(parts):
            columns = np.arange(first, last)
            start = tokens // self._size * self._index.slots[group]
            canonical = self._index.blocks[group][node, first - start : last - start].copy()
            own = self._tables.table[group][row, first:last]
            if (canonical != own).any():
                self._tables.adopt(group, np.full(len(columns), row), columns, canonical, draft)
        self._adopt_carried(row, node, draft)
        self._tables.make_private(row, tokens, draft)

    def publish_end(self, request: Request) -> list[bytes]:
        """Offer what a request that ends has, its last, partial page included.

        Returns the digests of what was not offered before.
        """
        row = request.row
        self.publish_prompt(request, request.prompt_tokens, None)
        digests = self.publish_decoded([row], None, None)
        settled = min(int(self._rows.computed[row]), int(self._rows.known[row]))
        if settled > self._rows.hashed[row]:
            digests.append(self._offer_tail(request, settled)[1])
        elif self._states and settled and self._rows.computed_of[row] == settled:
            lines: list[IndexArray] = [np.zeros(slots, np.intp) for slots in self._index.slots]
            for line, block in zip(
                lines[len(self._tables.table) :], self._states.carried(row), strict=True
            ):
                line[0] = block
            self._index.publish([self._rows.digests[row]], np.array([settled]), lines)
        self._states.end(row)
        return digests

    def row_digests(self, request: Request) -> list[bytes]:
        """Return the digests of a request's full pages; empty where its blocks are its alone."""
        row, index = request.row, self._index
        pages = int(self._rows.hashed[row]) // self._size
        digests = request.digests[:pages]
        nodes = np.zeros(pages, np.intp)
        for table, slots in zip(self._tables.table, index.slots, strict=False):
            blocks = table[row, : pages * slots].reshape(pages, slots)
            np.maximum(nodes, self._pool.node[blocks].max(axis=1, initial=0), out=nodes)
        for node in nodes[len(digests) :].tolist():
            digests.append(index.digest(node) if node else b"")
        return digests

    def _offer_tail(self, request: Request, tokens: int) -> tuple[int, bytes]:
        """Offer the blocks of the partial page that ends at `tokens`.

        Returns its boundary, and the digest that names it.
        """
        row, fields, tables = request.row, self._rows, self._tables.table
        hashed = fields.hashed[row]
        prior = fields.digests[row]
        partial = fields.newest[row, : tokens - hashed].tobytes()
        digest = page_digest(prior, partial, request.extra)
        if self._events is not None:
            self._events.name(prior, digest, partial, request.extra)
        node, dropped = self._index.publish_tail(
            prior or request.root,
            digest,
            tokens,
            [
                *(self._partial_blocks(group, row, tokens) for group in range(len(tables))),
                *(np.array([block]) for block in self._carried(row, tokens)),
            ],
        )
        for blocks in dropped:
            if len(blocks):
                self._pool.uncached(blocks)
        return node, digest

    # -- answers ------------------------------------------------------------------

    def _partial_blocks(self, group: int, row: int, tokens: int) -> IndexArray:
        """Return the row's blocks of the page that ends early at `tokens`, null if passed."""
        first, last = self._tables.partial(group, tokens)
        start = tokens // self._size * self._index.slots[group]
        blocks = self._tables.table[group][row, start:last].copy()
        blocks[: first - start] = 0
        return blocks

    def publish_decoded(
        self, rows: Sequence[int], together: IndexArray | None, draft: Draft | None
    ) -> list[bytes]:
        """Offer the pages that `rows` have completed since they were last asked.

        `together` are the same rows as an array; without it they are looked at one after the
        other. A page that is cached already is adopted in place of the row's own, given a draft.
        Returns the digests.
        """
        fields, size = self._rows, self._size
        found: list[bytes] = []
        while digests := (
            self._publish_each(rows, draft)
            if together is None
            else self._publish_together(together, draft)
        ):
            found += digests
            if fields.ahead < size:  # nobody can have completed another
                break
        return found

    def _publish_each(self, rows: Sequence[int], draft: Draft | None) -> list[bytes]:
        """Offer a page of each of `rows` that completed one, and return their digests."""
        fields, size = self._rows, self._size
        hashed, known, computed = fields.hashed_of, fields.known_of, fields.computed_of
        rows = [
            row
            for row in rows
            if (end := hashed[row] + size) <= known[row] and end <= computed[row]
        ]
        if not rows:
            return []
        digests = self._hash(rows, fields.take_pages(rows))
        ends = [hashed[row] for row in rows]
        pages = [self._tables.page_cells(row, end) for row, end in zip(rows, ends, strict=True)]
        if self._states:  # decodes write what they carry in place: nothing stays behind a page
            pages = [page + [[0]] * len(self._states) for page in pages]
        nodes = self._index.publish_few(digests, ends, pages)
        if nodes is not None and draft is not None:
            owners = np.array(rows, np.intp)
            behind = fields.hashed[owners]
            blocks = self._tables.lines.page_blocks(owners, behind)
            self._adopt(owners, behind, nodes, blocks, draft)
        return digests

    def _publish_together(self, rows: IndexArray, draft: Draft | None) -> list[bytes]:
        """Do what `_publish_each` does, with all rows at once."""
        fields = self._rows
        ends = fields.hashed[rows] + self._page
        done = ends <= np.minimum(fields.known[rows], fields.computed[rows])
        if not every(done):
            rows, ends = rows[done], ends[done]
        if not len(rows):
            return []
        digests = self._hash(rows.tolist(), fields.take_many_pages(rows, ends))
        blocks = self._tables.lines.page_blocks(rows, ends)
        if self._states:  # decodes write what they carry in place: nothing stays behind a page
            blocks += [np.zeros(len(rows), np.intp)] * len(self._states)
        nodes = self._index.publish(digests, ends, blocks)
        if nodes is not None and draft is not None:
            self._adopt(rows, ends, nodes, blocks, draft)
        return digests

    def _hash(self, rows: Sequence[int], pages: list[bytes]) -> list[bytes]:
        """Return the digests of `pages`, which come behind the hashed ones of `rows`."""
        digests, extras = self._rows.digests, self._rows.extras
        priors = [digests[row] for row in rows]
        if extras:
            pages = [page + extras.get(row, b"") for row, page in zip(rows, pages, strict=True)]
        new = next_digests(priors, pages)
        for row, digest in zip(rows, new, strict=True):
            digests[row] = digest
        if self._events is not None:
            last = _COUNT_BYTES + 4 * self._size
            for row, prior, digest, page in zip(rows, priors, new, pages, strict=True):
                self._events.name(prior, digest, page[_COUNT_BYTES:last], extras.get(row, b""))
        return new

    def _adopt(
        self,
        rows: IndexArray,
        ends: IndexArray,
        nodes: Sequence[int],
        blocks: Sequence[IndexArray],
        draft: Draft,
    ) -> None:
        """Have `rows` hold the cached blocks of `nodes` in place of others of their own."""
        for group, line in enumerate(blocks[: len(self._tables.table)]):
            canonical = self._index.blocks[group][nodes]
            slots = self._index.slots[group]
            own = line.reshape(-1, slots)
            which, slot = np.nonzero((canonical != own) & (canonical > 0) & (own > 0))
            if len(which):
                first = ends // self._tables.block_tokens[group] - slots
                self._tables.adopt(
                    group,
                    rows[which],
                    first[which] + slot,
                    canonical[which, slot],
                    draft,
                )

"""What is cached of which prefix: boundaries by digest, and the blocks each group has there.

A boundary is a position in a token sequence that a chained digest names. It has
room for the blocks that every group keeps of the page before it, so that one look
at the digest answers for all groups, and which blocks a run of boundaries has is
one array look-up. A boundary lives as long as it has a block. It knows nothing of
requests.
"""

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from drumline.core.errors import InvariantError
from drumline.scheduler.blocks import BlockPool
from drumline.scheduler.digests import DIGEST, Digests
from drumline.scheduler.index import FEW, NOBODY, IndexArray

_FIRST_CAPACITY = 1024
_NOTHING = np.void(bytes(DIGEST.itemsize))
"""The digest of no boundary."""
_STRIDE = 256
"""Digests looked up at a time, so that a miss early in a long prompt ends the look."""
Page = Sequence[Sequence[int]]
"""Each group's blocks of a page."""

MAX_TAILS = 8
"""Partial pages kept behind one full page; older ones go."""


class PrefixIndex:
    """Boundaries of cached prefixes.

    `blocks[g][node, slot]` is the block of group g that holds the slot-th part of the
    page before boundary `node`, or 0. `slots[g]` is how many parts a page has.
    """

    __slots__ = (
        "_cells",
        "_digests",
        "_filled",
        "_free",
        "_free_count",
        "_group_of",
        "_lines",
        "_nodes",
        "_owner",
        "_owner_of",
        "_runs",
        "_tail_of",
        "_tails",
        "blocks",
        "end",
        "page_tokens",
        "slots",
        "touched",
    )

    def __init__(self, page_tokens: int, slots: Sequence[int]) -> None:
        size = _FIRST_CAPACITY
        self.page_tokens = page_tokens
        self.slots = list(slots)
        self.blocks: list[IndexArray] = [np.zeros((size, count), np.intp) for count in slots]
        self.end: IndexArray = np.zeros(size, np.intp)
        """Tokens from the start of the sequence to the boundary."""
        self._filled: IndexArray = np.zeros(size, np.intp)
        self._digests = np.zeros(size, DIGEST)
        self._nodes: dict[bytes, int] = {}
        self._runs: dict[int, IndexArray] = {}
        """The boundaries that were made along one prompt, by the first of them. A prompt that
        comes to that one likely has the others: one look at their digests' bytes says which,
        where a look at each of thousands in `_nodes` costs what memory that no cache holds does.
        """
        self._free: IndexArray = np.arange(size - 1, 0, -1)
        self._free_count = size - 1
        # The same memory as `blocks`, a line of cells; and for who looks at one of them.
        self._lines = [part.reshape(-1) for part in self.blocks]
        self._cells = [line.data for line in self._lines]
        self._owner: IndexArray = np.zeros(0, np.intp)
        self._owner_of = self._owner.data
        self._group_of = np.zeros(0, np.int8)

        self.touched: dict[bytes, None] | None = None
        """Digests of boundaries that changed since somebody, who sets this, last looked."""

        # The partial pages behind each full one, by its digest, oldest first; and back.
        self._tails: dict[bytes, list[int]] = {}
        self._tail_of: dict[int, bytes] = {}

    def watch(self, pool: BlockPool) -> None:
        """Mark in `pool` which boundary a block belongs to."""
        self._owner, self._group_of = pool.node, pool.group_of
        self._owner_of = self._owner.data

    def depth(self, blocks: IndexArray) -> IndexArray:
        """Return how far cached blocks are from their sequence's start, as a number to sort by.

        Of two blocks that start at the same token, the one of the lower number is deeper.
        """
        nodes = self._owner[blocks]
        start = (self.end[nodes] - 1) // self.page_tokens * self.page_tokens
        groups = self._group_of[blocks]
        for group, slots in enumerate(self.slots):
            if slots > 1:
                mine = np.flatnonzero(groups == group)
                slot = (self.blocks[group][nodes[mine]] == blocks[mine][:, None]).argmax(axis=1)
                start[mine] += slot * (self.page_tokens // slots)
        depth: IndexArray = (start << 32) - blocks
        return depth

    def __len__(self) -> int:
        return len(self._nodes)

    def digest(self, node: int) -> bytes:
        """Return what names a boundary."""
        digest: bytes = self._digests[node].tobytes()
        return digest

    def prior(self, node: int) -> bytes:
        """Return what a partial page's boundary is filed behind; empty for a full page's."""
        return self._tail_of.get(node, b"")

    def known(self, digests: Digests, count: int) -> IndexArray:
        """Return the boundaries of the first `count` digests, as far as they are known."""
        found: list[IndexArray] = []
        at = 0
        while at < count and (head := self._nodes.get(digests[at], 0)):
            run = self._runs.get(head)
            if run is not None:
                run = run[: count - at]
                nodes = run[: digests.alike(at, self._digests.take(run))]
            else:
                nodes = self.anywhere(digests[at : min(at + _STRIDE, count)])
                if np.count_nonzero(nodes) < len(nodes):
                    found.append(nodes[: nodes.argmin()])
                    break
            found.append(nodes)
            at += len(nodes)
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else NOBODY

    def anywhere(self, digests: Sequence[bytes]) -> IndexArray:
        """Return the boundary of each of `digests`, 0 where it is unknown."""
        return np.fromiter(map(self._nodes.get, digests, repeat(0)), np.intp, len(digests))

    def find(self, digest: bytes) -> int:
        """Return the boundary of `digest`, or 0."""
        return self._nodes.get(digest, 0)

    def complete(self, digest: bytes) -> int:
        """Return where the boundary of `digest` ends if every group has all it keeps there.

        In tokens from the start of the sequence; else 0.
        """
        node = self.find(digest)
        end = int(self.end[node]) if node else 0
        tokens = end % self.page_tokens or self.page_tokens
        wanted = sum(-(-tokens * slots // self.page_tokens) for slots in self.slots)
        return end if self._filled[node] == wanted else 0

    def publish(
        self,
        digests: Sequence[bytes],
        ends: IndexArray,
        blocks: Sequence[IndexArray],
        *,
        chained: bool = False,
    ) -> list[int] | None:
        """Offer held blocks at the boundaries of `digests`, `ends[i]` tokens from the start.

        `blocks[g]` has `slots[g]` blocks for each boundary, in a line. A block that a
        boundary has already stays the canonical one. Returns the boundaries if some of them
        were known, so that their blocks may not be those offered, else None. They are `chained`
        where each is the next page of the same prompt.
        """
        count = len(digests)
        if self.touched is not None:
            self.touched.update(dict.fromkeys(digests))
        if count > FEW and self._publish_new(digests, ends, blocks, chained):
            return None
        lines = [line.tolist() for line in blocks]
        pages = [
            [
                line[at * slots : at * slots + slots]
                for line, slots in zip(lines, self.slots, strict=True)
            ]
            for at in range(count)
        ]
        return self._offer_all(digests, ends.tolist(), pages)

    def publish_few(
        self, digests: Sequence[bytes], ends: Sequence[int], pages: Sequence[Page]
    ) -> list[int] | None:
        """Do what `publish` does, given each boundary's page on its own."""
        if self.touched is not None:
            self.touched.update(dict.fromkeys(digests))
        return self._offer_all(digests, ends, pages)

    def _offer_all(
        self, digests: Sequence[bytes], ends: Sequence[int], pages: Sequence[Page]
    ) -> list[int] | None:
        if_new = len(self._nodes) + len(digests)
        nodes = list(map(self._offer, digests, ends, pages))
        return None if len(self._nodes) == if_new else nodes

    def _publish_new(
        self,
        digests: Sequence[bytes],
        ends: IndexArray,
        blocks: Sequence[IndexArray],
        chained: bool,
    ) -> bool:
        """Publish at boundaries that are unknown and distinct; if they are not, return False."""
        nodes = self._make(digests, ends)
        if nodes is None:
            return False
        filled: int | IndexArray = 0
        full = False
        for mine, slots, offered in zip(self._lines, self.slots, blocks, strict=True):
            cells = owners = nodes
            if slots > 1:
                owners = nodes.repeat(slots)
                cells = (nodes[:, None] * slots + np.arange(slots)).reshape(-1)
            mine[cells] = offered
            count = np.count_nonzero(offered)
            if count == len(offered):
                self._owner[offered] = owners
                filled += slots
                full = True
            elif count:
                held = offered > 0
                self._owner[offered[held]] = owners[held]
                filled += held.reshape(-1, slots).sum(axis=1)
        self._filled[nodes] = filled
        if chained:
            self._runs[nodes.item(0)] = nodes
        if not full:
            for node in nodes[self._filled[nodes] == 0].tolist():
                self._forget_node(node)
        return True

    def _offer(self, digest: bytes, end: int, page: Page) -> int:
        """Offer `page[g]` at one boundary; returns it, 0 if windows have passed every block."""
        node = self._nodes.get(digest, 0)
        if not node:
            node = self._make_one(digest, end)
        owner, filled = self._owner_of, 0
        for cells, slots, offered in zip(self._cells, self.slots, page, strict=True):
            for at, block in enumerate(offered, node * slots):
                if block and not cells[at]:
                    cells[at] = block
                    owner[block] = node
                    filled += 1
        self._filled[node] += filled
        if not filled and not self._filled[node]:
            self._forget_node(node)
            return 0
        return node

    # -- tails --------------------------------------------------------------------

    def publish_tail(
        self, prior: bytes, digest: bytes, end: int, blocks: Sequence[IndexArray]
    ) -> tuple[int, list[IndexArray]]:
        """Offer the held blocks of a partial page behind the full page of digest `prior`.

        Returns its boundary, and the tails' blocks that had to go to make place, a group
        an entry: they are no longer cached.
        """
        if self.touched is not None:
            self.touched[digest] = None
        padded = []
        for slots, offered in zip(self.slots, blocks, strict=True):
            padded.append(offered.tolist() + [0] * (slots - len(offered)))
        node = self._offer(digest, end, padded)
        dropped: list[IndexArray] = [NOBODY for _ in self.slots]
        if node not in self._tail_of:
            tails = self._tails.setdefault(prior, [])
            if len(tails) == MAX_TAILS:
                oldest = tails[0]
                dropped = [part[oldest][part[oldest] > 0] for part in self.blocks]
                for group, gone in enumerate(dropped):
                    self.forget(group, gone)
                tails = self._tails.setdefault(prior, [])
            tails.append(node)
            self._tail_of[node] = prior
        return node, dropped

    def tails(self, prior: bytes) -> list[tuple[int, int]]:
        """Return boundary and end of the partial pages behind a full one, longest first."""
        found = self._tails.get(prior)
        if not found:
            return []
        return sorted(((node, int(self.end[node])) for node in found), key=_by_end, reverse=True)

    def _make(self, digests: Sequence[bytes], ends: IndexArray) -> IndexArray | None:
        """Return new boundaries for `digests`; None if they are not all unknown and distinct."""
        count = len(digests)
        if self._free_count < count:
            self._grow(count)
        nodes = self._free[self._free_count - count : self._free_count].copy()
        line, known = nodes.tolist(), self._nodes
        # One look at each digest says whether it was known, and makes it so if not.
        found = list(map(known.setdefault, digests, line))
        if found != line:
            for digest, node, mine in zip(digests, found, line, strict=True):
                if node == mine:
                    del known[digest]
            return None
        self._free_count -= count
        self._digests[nodes] = np.frombuffer(b"".join(digests), DIGEST)
        self.end[nodes] = ends
        return nodes

    def _make_one(self, digest: bytes, end: int) -> int:
        """Return a new boundary for `digest`, which is unknown."""
        if not self._free_count:
            self._grow(1)
        self._free_count -= 1
        node = self._free.item(self._free_count)
        self._nodes[digest] = node
        self._digests[node] = np.void(digest)
        self.end[node] = end
        return node

    def forget(self, group: int, blocks: IndexArray) -> None:
        """Drop the group's `blocks` from their boundaries; a boundary without blocks goes."""
        cells, slots, owner = self._cells[group], self.slots[group], self._owner_of
        for block in blocks.tolist():
            node = owner[block]
            owner[block] = 0
            if self.touched is not None:
                self.touched[self.digest(node)] = None
            at = node * slots
            while cells[at] != block:
                at += 1
            cells[at] = 0
            filled = self._filled.item(node) - 1
            self._filled[node] = filled
            if not filled:
                self._forget_node(node)

    def _forget_node(self, node: int) -> None:
        del self._nodes[self.digest(node)]
        self._digests[node] = _NOTHING
        self._runs.pop(node, None)
        self._free[self._free_count] = node
        self._free_count += 1
        if node in self._tail_of:
            self._forget_tail(node)

    def _forget_tail(self, node: int) -> None:
        prior = self._tail_of.pop(node)
        tails = self._tails[prior]
        tails.remove(node)
        if not tails:
            del self._tails[prior]

    def _grow(self, wanted: int) -> None:
        old = len(self.end)
        new = max(2 * old, old + wanted)
        self.blocks = [_lengthened(part, new) for part in self.blocks]
        self._lines = [part.reshape(-1) for part in self.blocks]
        self._cells = [line.data for line in self._lines]
        self.end = _lengthened(self.end, new)
        self._filled = _lengthened(self._filled, new)
        self._digests = np.concatenate((self._digests, np.zeros(new - old, DIGEST)))
        free = np.concatenate((np.arange(new - 1, old - 1, -1), self._free[: self._free_count]))
        self._free_count = len(free)
        self._free = _lengthened(free, new)

    def check(self, pool: BlockPool) -> None:
        """Raise InvariantError unless boundaries and cached blocks name each other."""
        filled = np.zeros_like(self._filled)
        held = 0
        for part in self.blocks:
            nodes, _slots = np.nonzero(part)
            np.add.at(filled, nodes, 1)
            blocks = part[part > 0]
            held += len(blocks)
            if not np.array_equal(self._owner[blocks], nodes):
                raise InvariantError("a cached block does not know its boundary")
        if not np.array_equal(filled, self._filled):
            raise InvariantError("a boundary counts blocks that it does not have")
        if held != len(pool.cached_blocks()):
            raise InvariantError("a block is cached without a boundary")
        live = sorted(self._nodes.values())
        if live != np.flatnonzero(filled).tolist():
            raise InvariantError("a boundary is known without blocks, or unknown with some")
        if any(self.digest(node) != key for key, node in self._nodes.items()):
            raise InvariantError("a boundary does not know its digest")
        if not self._runs.keys() <= set(live):
            raise InvariantError("a run starts at a boundary that is gone")
        if len(live) + self._free_count != len(self.end) - 1:
            raise InvariantError("a boundary is lost")
        tails = {node: prior for prior, nodes in self._tails.items() for node in nodes}
        if tails != self._tail_of or not tails.keys() <= set(live):
            raise InvariantError("a tail is lost")


def _by_end(tail: tuple[int, int]) -> int:
    return tail[1]


def _lengthened(array: IndexArray, size: int) -> IndexArray:
    longer = np.zeros((size, *array.shape[1:]), np.intp)
    longer[: len(array)] = array
    return longer

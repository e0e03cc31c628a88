"""The request pool: what is known of a running request, an entry a row in every field.

Numbers are arrays, for whoever looks at many rows at once. Of those that single rows
are asked for, `…_of` is the same memory as a line of cells: far cheaper there.

Rows are 1 … max_rows; row 0 is never given. A freed row goes to the back of the
line. A row's generation grows when its owner leaves, so that whatever still names
the old owner is recognised.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from drumline.contract.arrays import IntArray
from drumline.core.errors import InvariantError
from drumline.scheduler.index import IndexArray, scalar
from drumline.scheduler.requests import Request


class Suspended(Struct, frozen=True, eq=False):
    """The fields of a row whose owner left it for a while."""

    computed: int
    known: int
    hashed: int
    digest: bytes
    newest: IntArray
    last: int


class Rows:
    """Fields of running requests, by row."""

    __slots__ = (
        "_bytes",
        "_cells",
        "_cursor_of",
        "_free",
        "_front",
        "_page",
        "_page_tokens",
        "_records",
        "ahead",
        "columns",
        "columns_of",
        "computed",
        "computed_of",
        "cursor",
        "digests",
        "epoch",
        "extras",
        "first",
        "first_of",
        "frames",
        "generation",
        "generation_of",
        "hashed",
        "hashed_of",
        "known",
        "known_of",
        "last",
        "newest",
        "outstanding",
        "owners",
        "quiet",
        "sequence",
        "sequence_of",
        "silent",
    )

    def __init__(self, max_rows: int, groups: int, page_tokens: int, ahead_tokens: int) -> None:
        """Make rows that keep a page of tokens, and `ahead_tokens` beyond it, until hashed."""
        size = max_rows + 1
        self._page = page_tokens
        self._page_tokens = scalar(page_tokens)
        self.ahead = ahead_tokens
        """Tokens that may be known beyond a page."""
        self.generation: IntArray = np.ones(size, np.int32)
        self.sequence: IndexArray = np.zeros(size, np.intp)
        """Order of submission."""
        self.epoch: IndexArray = np.zeros(size, np.intp)
        """Order of admission."""
        self.computed: IndexArray = np.zeros(size, np.intp)
        """Tokens that the forwards planned so far leave in the cache, at most."""
        self.known: IndexArray = np.zeros(size, np.intp)
        """Prompt and answer tokens whose values are known."""
        self.outstanding: IndexArray = np.zeros(size, np.intp)
        """Planned forwards that owe this row a result."""
        self.silent: IndexArray = np.zeros(size, np.intp)
        """Planned chunks whose result has no tokens, ahead of what is outstanding."""
        self.quiet = 0
        """The sum of `silent`."""
        self.columns: IndexArray = np.zeros((groups, size), np.intp)
        """Columns of each group's block table that the row uses, [group, row]."""
        self.first: IndexArray = np.zeros((groups, size), np.intp)
        """The first of them that is not null, the group's window having passed the others."""
        self.hashed: IndexArray = np.zeros(size, np.intp)
        """Tokens in pages whose digest is known."""
        self.last: IntArray = np.zeros(size, np.int32)
        """The last known token of an answer, kept where plans name what is fed."""
        self.frames: IntArray = np.zeros((size, 1 + page_tokens + ahead_tokens), np.int32)
        """A page's count of tokens and the tokens behind the hashed ones, as they are hashed."""
        self.frames[:, 0] = page_tokens
        self.newest: IntArray = self.frames[:, 1:]
        """Those tokens."""
        self._records = self.frames.view(_record(page_tokens, ahead_tokens)).reshape(-1)
        """The same memory, a frame an element: thousands are taken, or become bytes, in a call."""
        self._front = self._records["front"]
        """Where tokens go that were known beyond a page which is hashed."""
        self.cursor: IndexArray = np.zeros(size, np.intp)
        """Where in the flattened `frames` the row's next token goes."""
        self.digests: list[bytes] = [b""] * size
        """Digest of the last hashed page."""
        self.extras: dict[int, bytes] = {}
        """What is hashed with every page of a row, where its owner has a cache namespace."""
        self.owners: list[Request | None] = [None] * size
        self.generation_of = self.generation.data
        self.sequence_of = self.sequence.data
        self.computed_of = self.computed.data
        self.known_of = self.known.data
        self.hashed_of = self.hashed.data
        self.columns_of = [field.data for field in self.columns]
        self.first_of = [field.data for field in self.first]
        self._cursor_of = self.cursor.data
        self._cells = self.frames.reshape(-1).data
        self._bytes = self._cells.cast("B")
        self._free = deque(range(1, size))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, owner: Request) -> int:
        """Give `owner` the row that is free the longest."""
        row = self._free.popleft()
        self.owners[row] = owner
        self.sequence[row] = owner.sequence
        self.epoch[row] = owner.epoch
        for field in (self.computed, self.known, self.outstanding):
            field[row] = 0
        for line in (*self.columns_of, *self.first_of):
            line[row] = 0
        if owner.extra:
            self.extras[row] = owner.extra
        self.hashed[row] = 0
        self.digests[row] = b""
        return row

    def know(self, row: int, known: int, hashed: int, digest: bytes, newest: IntArray) -> None:
        """Say what is known of a row's tokens.

        `known` of them are, the first `hashed` in pages up to `digest`; the others are
        the first of `newest`.
        """
        self.known[row] = known
        self.hashed[row] = hashed
        self.digests[row] = digest
        self.newest[row, : len(newest)] = newest
        self.cursor[row] = row * self.frames.shape[1] + 1 + known - hashed

    def begin_answer(self, row: int, page_tokens: int) -> None:
        """Set the row up for what follows its owner's prompt, which is planned as a whole.

        `page_tokens` is 0 where nothing is hashed.
        """
        owner = self.owners[row]
        assert owner is not None
        known = owner.prompt_tokens
        hashed = known // page_tokens * page_tokens if page_tokens else known
        digest = owner.digests[-1] if owner.digests else b""
        self.know(row, known, hashed, digest, owner.tokens[hashed:])

    def append(self, row: int, token: int, *, hashing: bool) -> None:
        """Add a known token to a row's; it is kept where pages are hashed."""
        self.known[row] += 1
        self.last[row] = token
        if hashing:
            self._cells[self._cursor_of[row]] = token
            self.cursor[row] += 1

    def take_pages(self, rows: Sequence[int]) -> list[bytes]:
        """Take the page behind the hashed tokens of each of `rows`, and return it as it is hashed.

        It counts as hashed from now on.
        """
        hashed, known, cursor, cells = self.hashed_of, self.known_of, self._cursor_of, self._cells
        span, size, pages = self.frames.shape[1], self._page, []
        for row in rows:
            first = row * span
            pages.append(self._bytes[4 * first : 4 * (first + 1 + size)].tobytes())
            end = hashed[row] = hashed[row] + size
            for at in range(first + 1, first + 1 + known[row] - end):
                cells[at] = cells[at + size]
            cursor[row] -= size
        return pages

    def take_many_pages(self, rows: IndexArray, ends: IndexArray) -> list[bytes]:
        """Do what `take_pages` does, with all rows at once, whose pages end at `ends`."""
        taken = self._records.take(rows)
        self._front[rows] = taken["behind"]
        self.cursor[rows] -= self._page_tokens
        self.hashed[rows] = ends
        pages: list[bytes] = taken["page"].tolist()
        return pages

    def suspend(self, row: int) -> Suspended:
        """Return what `resume` needs."""
        return Suspended(
            computed=int(self.computed[row]),
            known=int(self.known[row]),
            hashed=int(self.hashed[row]),
            digest=self.digests[row],
            newest=self.newest[row].copy(),
            last=int(self.last[row]),
        )

    def resume(self, row: int, fields: Suspended) -> None:
        """Have a row that was just taken go on where another one was suspended."""
        self.computed[row] = fields.computed
        self.last[row] = fields.last
        self.know(row, fields.known, fields.hashed, fields.digest, fields.newest)

    def give_back(self, row: int) -> None:
        self.owners[row] = None
        self.extras.pop(row, None)
        self.generation[row] += 1
        self.quiet -= int(self.silent[row])
        self.silent[row] = 0
        self._free.append(row)

    def check(self) -> None:
        """Raise InvariantError unless every row is either free or owned by who names it."""
        free = set(self._free)
        if len(free) != len(self._free) or 0 in free:
            raise InvariantError("a row is free twice, or row 0 is")
        for row in range(1, len(self.owners)):
            owner = self.owners[row]
            if (owner is None) != (row in free) or (owner is not None and owner.row != row):
                raise InvariantError(f"row {row} is lost")
        if self.quiet != int(self.silent.sum()):
            raise InvariantError("chunks without tokens are miscounted")


def _record(page_tokens: int, ahead_tokens: int) -> np.dtype[np.void]:
    """Return what a frame is made of: the page as it is hashed, the tokens at its front, and
    as many behind it."""
    page, ahead = 4 * page_tokens, 4 * ahead_tokens
    return np.dtype(
        {
            "names": ["page", "front", "behind"],
            "formats": [f"V{4 + page}", f"V{ahead}", f"V{ahead}"],
            "offsets": [0, 4, 4 + page],
            "itemsize": 4 + page + ahead,
        }
    )

"""The request pool: what is known of a running request, an entry a row in every field.

What every round touches for all rows is an array; what only rows that are due are asked
for, one by one, is a list.

Rows are 1 … max_rows; row 0 is never given. A freed row goes to the back of the
line. A row's generation grows when its owner leaves, so that whatever still names
the old owner is recognised.
"""

from collections import deque

import numpy as np
from msgspec import Struct

from drumline.contract.arrays import IntArray
from drumline.core.errors import InvariantError
from drumline.scheduler.index import IndexArray
from drumline.scheduler.requests import Request


class Suspended(Struct, frozen=True, eq=False):
    """The fields of a row whose owner left it for a while."""

    computed: int
    known: int
    hashed: int
    digest: bytes
    newest: IntArray


class Rows:
    """Fields of running requests, by row."""

    __slots__ = (
        "_free",
        "columns",
        "computed",
        "computed_of",
        "digests",
        "epoch",
        "extras",
        "first",
        "generation",
        "hashed",
        "known",
        "known_of",
        "newest",
        "newest_of",
        "origin",
        "origin_of",
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
        self.columns = [[0] * size for _ in range(groups)]
        """Columns of each group's block table that the row uses."""
        self.first = [[0] * size for _ in range(groups)]
        """The first of them that is not null, the group's window having passed the others."""
        self.hashed = [0] * size
        """Tokens in pages whose digest is known."""
        self.newest: IntArray = np.zeros((size, page_tokens + ahead_tokens), np.int32)
        """The tokens behind the hashed ones."""
        self.origin: IndexArray = np.arange(size) * self.newest.shape[1]
        """Where in the flattened `newest` the row's token 0 would be."""
        self.digests: list[bytes] = [b""] * size
        """Digest of the last hashed page."""
        self.extras: list[bytes] = [b""] * size
        """What is hashed with every page: the owner's cache namespace."""
        self.owners: list[Request | None] = [None] * size
        # The same memory, for who looks at one row: far cheaper there than an array is.
        self.sequence_of = self.sequence.data
        self.computed_of = self.computed.data
        self.known_of = self.known.data
        self.origin_of = self.origin.data
        self.newest_of = self.newest.reshape(-1).data
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
        for line in (*self.columns, *self.first):
            line[row] = 0
        self.extras[row] = owner.extra
        self.hash_from(row, 0, b"")
        return row

    def hash_from(self, row: int, tokens: int, digest: bytes) -> None:
        """Say that the row's first `tokens` are hashed, up to `digest`."""
        self.hashed[row] = tokens
        self.origin[row] = row * self.newest.shape[1] - tokens
        self.digests[row] = digest

    def begin_answer(self, row: int, page_tokens: int) -> None:
        """Set the row up for what follows its owner's prompt, which is planned as a whole.

        `page_tokens` is 0 where nothing is hashed.
        """
        owner = self.owners[row]
        assert owner is not None
        self.known[row] = owner.prompt_tokens
        if page_tokens:
            hashed = owner.prompt_tokens // page_tokens * page_tokens
            self.hash_from(row, hashed, owner.digests[-1] if owner.digests else b"")
            tail = owner.tokens[hashed:]
            self.newest[row, : len(tail)] = tail

    def append(self, row: int, token: int, *, hashing: bool) -> None:
        """Add a known token to a row's; it is kept where pages are hashed."""
        known = self.known_of[row]
        if hashing:
            self.newest_of[self.origin_of[row] + known] = token
        self.known[row] = known + 1

    def suspend(self, row: int) -> Suspended:
        """Return what `resume` needs."""
        return Suspended(
            computed=int(self.computed[row]),
            known=int(self.known[row]),
            hashed=self.hashed[row],
            digest=self.digests[row],
            newest=self.newest[row].copy(),
        )

    def resume(self, row: int, fields: Suspended) -> None:
        """Have a row that was just taken go on where another one was suspended."""
        self.computed[row] = fields.computed
        self.known[row] = fields.known
        self.hash_from(row, fields.hashed, fields.digest)
        self.newest[row] = fields.newest

    def give_back(self, row: int) -> None:
        self.owners[row] = None
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

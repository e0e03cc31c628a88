"""The request pool: what is known of a running request, a field an array, an entry a row.

Rows are 1 … max_rows; row 0 is never given. A freed row goes to the back of the
line. A row's generation grows when its owner leaves, so that whatever still names
the old owner is recognised.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from drumline.contract.arrays import IntArray
from drumline.core.errors import InvariantError
from drumline.scheduler.requests import Request


class Rows:
    """Fields of running requests, by row."""

    __slots__ = (
        "_free",
        "columns",
        "computed",
        "digests",
        "generation",
        "hashed",
        "known",
        "outstanding",
        "owners",
        "recent",
        "room",
        "sequence",
        "silent",
    )

    def __init__(self, max_rows: int, groups: int, recent_tokens: int) -> None:
        size = max_rows + 1
        self.generation: IntArray = np.ones(size, np.int32)
        self.sequence: npt.NDArray[np.int64] = np.zeros(size, np.int64)
        """Order of submission."""
        self.computed: IntArray = np.zeros(size, np.int32)
        """Tokens that the forwards planned so far leave in the cache, at most."""
        self.known: IntArray = np.zeros(size, np.int32)
        """Prompt and answer tokens whose values are known."""
        self.outstanding: IntArray = np.zeros(size, np.int32)
        """Planned forwards that owe this row a result."""
        self.silent: IntArray = np.zeros(size, np.int32)
        """Planned chunks whose result has no tokens, ahead of what is outstanding."""
        self.room: IntArray = np.zeros(size, np.int32)
        """Tokens that the row's blocks have room for, over all groups."""
        self.columns: IntArray = np.zeros((groups, size), np.int32)
        """Columns of each group's block table that the row uses."""
        self.hashed: IntArray = np.zeros(size, np.int32)
        """Tokens in pages whose digest is known."""
        self.recent: IntArray = np.zeros((size, recent_tokens), np.int32)
        """The newest tokens, at position modulo its width: what is not hashed yet."""
        self.digests: list[bytes] = [b""] * size
        """Digest of the last hashed page."""
        self.owners: list[Request | None] = [None] * size
        self._free = deque(range(1, size))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, owner: Request) -> int:
        """Give `owner` the row that is free the longest."""
        row = self._free.popleft()
        self.owners[row] = owner
        self.sequence[row] = owner.sequence
        for field in (self.computed, self.known, self.outstanding, self.silent, self.room):
            field[row] = 0
        self.hashed[row] = 0
        self.columns[:, row] = 0
        self.digests[row] = b""
        return row

    def give_back(self, row: int) -> None:
        self.owners[row] = None
        self.generation[row] += 1
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

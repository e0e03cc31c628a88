"""The rows that decode, in order of submission, as the arrays a batch carries.

While nobody joins or leaves, the same arrays are returned again, so that whoever
holds derived inputs can keep them.
"""

import numpy as np

from drumline.contract.arrays import IntArray
from drumline.core.errors import InvariantError
from drumline.scheduler.index import IndexArray


class Roster:
    """Decoding rows: to index with (`index`), and as a batch carries them.

    `ones` and `steps` have an entry for every row of the pool, 0 where it does not decode:
    what each decode adds to counts and to lengths. Adding to all rows is cheaper than
    picking some.
    """

    __slots__ = (
        "_generation",
        "_members",
        "_sequence",
        "_stale",
        "_width",
        "generations",
        "index",
        "lengths",
        "ones",
        "rows",
        "steps",
    )

    def __init__(self, sequence: IndexArray, generation: IntArray, width: int) -> None:
        self._width = width
        self._sequence = sequence
        self._generation = generation
        self._members: set[int] = set()
        self._stale = True
        self.index: IndexArray
        self.rows: IntArray
        self.generations: IntArray
        self.lengths: IntArray
        self.ones: IndexArray
        self.steps: IndexArray
        self.refresh()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, row: int) -> bool:
        return row in self._members

    def join(self, row: int) -> None:
        self._members.add(row)
        self._stale = True

    def leave(self, row: int) -> None:
        self._members.discard(row)
        self._stale = True

    def refresh(self) -> None:
        """Bring the arrays up to date."""
        if not self._stale:
            return
        rows = np.fromiter(self._members, np.intp, len(self._members))
        self.index = rows[np.argsort(self._sequence[rows], kind="stable")]
        self.rows = self.index.astype(np.int32)
        self.generations = self._generation[self.index]
        self.lengths = np.full(len(rows), self._width, np.int32)
        self.ones = self.marks(self.index)
        self.steps = self.ones * self._width
        for array in (self.index, self.rows, self.generations, self.lengths):
            array.flags.writeable = False
        self._stale = False

    def marks(self, index: IndexArray) -> IndexArray:
        """Return 1 for each of `index` and 0 for every other row of the pool."""
        marks = np.zeros_like(self._sequence)
        marks[index] = 1
        return marks

    def current(self, rows: IntArray) -> bool:
        """Whether `rows` is the very array of a batch whose rows have all stayed."""
        return rows is self.rows and not self._stale

    def newest(self) -> int:
        """Return the row submitted last."""
        return max(self._members, key=self._sequence.__getitem__)

    def check(self) -> None:
        """Raise InvariantError unless the arrays say what the members are."""
        if not self._stale and set(self.rows.tolist()) != self._members:
            raise InvariantError("the decode batch names rows that do not decode")

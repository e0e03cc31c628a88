"""The rows that decode, in order of submission, as the arrays a batch carries.

While nobody joins or leaves, the same arrays are returned again, so that whoever
holds derived inputs can keep them.
"""

import numpy as np
import numpy.typing as npt

from drumline.contract.arrays import IntArray
from drumline.core.errors import InvariantError


class Roster:
    """Decoding rows and their generations."""

    __slots__ = (
        "_generation",
        "_members",
        "_sequence",
        "_stale",
        "_width",
        "generations",
        "lengths",
        "rows",
    )

    def __init__(self, sequence: npt.NDArray[np.int64], generation: IntArray, width: int) -> None:
        self._width = width
        self._sequence = sequence
        self._generation = generation
        self._members: set[int] = set()
        self._stale = True
        self.rows: IntArray
        self.generations: IntArray
        self.lengths: IntArray
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
        """Bring `rows`, `generations` and `lengths` up to date."""
        if not self._stale:
            return
        rows = np.fromiter(self._members, np.int32, len(self._members))
        self.rows = rows[np.argsort(self._sequence[rows], kind="stable")]
        self.generations = self._generation[self.rows]
        self.lengths = np.full(len(rows), self._width, np.int32)
        for array in (self.rows, self.generations, self.lengths):
            array.flags.writeable = False
        self._stale = False

    def newest(self) -> int:
        """Return the row submitted last."""
        return max(self._members, key=self._sequence.__getitem__)

    def check(self) -> None:
        """Raise InvariantError unless the arrays say what the members are."""
        if not self._stale and set(self.rows.tolist()) != self._members:
            raise InvariantError("the decode batch names rows that do not decode")

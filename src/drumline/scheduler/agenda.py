"""Which rows need attention in which round.

A row is filed under the first round in which it can be due. It may turn out not to
be due yet, when it was left out of a round in between, and is filed again. Filings
are never removed: each carries its row's generation, and one whose row has changed
hands is void.
"""

import numpy as np
import numpy.typing as npt

from drumline.contract.arrays import IntArray


class Agenda:
    """Rows, by the round in which they are due."""

    __slots__ = ("_filed", "_generation", "_stride")

    def __init__(self, generation: IntArray) -> None:
        self._generation = generation
        self._stride = len(generation)
        self._filed: dict[int, list[int]] = {}

    def file(self, rows: IntArray, rounds: npt.NDArray[np.int64]) -> None:
        """File `rows[i]` under round `rounds[i]`."""
        codes = self._generation[rows].astype(np.int64) * self._stride + rows
        filed = self._filed
        for at, code in zip(rounds.tolist(), codes.tolist(), strict=True):
            bucket = filed.get(at)
            if bucket is None:
                filed[at] = [code]
            else:
                bucket.append(code)

    def take(self, at: int) -> IntArray:
        """Remove and return the rows due in round `at`."""
        codes = self._filed.pop(at, None)
        if codes is None:
            return _NOBODY
        generations, rows = np.divmod(np.array(codes, np.int64), self._stride)
        valid: IntArray = rows[self._generation[rows] == generations].astype(np.int32)
        return valid

    def filed(self) -> set[int]:
        """Return the rows that have a valid filing; for checks."""
        return {
            code % self._stride
            for codes in self._filed.values()
            for code in codes
            if self._generation[code % self._stride] == code // self._stride
        }


_NOBODY = np.empty(0, np.int32)
_NOBODY.flags.writeable = False

"""Which rows need attention in which round.

A row is filed under the first round in which it can be due, once. It may turn out not
to be due yet, when it was left out of a round in between, and is filed again.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from drumline.scheduler.index import FEW, ZERO, IndexArray, scalar


class Agenda:
    """Rows, by the round in which they are due. The next round is the one behind the last taken."""

    __slots__ = ("_due", "_due_of", "_filed", "_next")

    def __init__(self, size: int) -> None:
        """Make place for rows below `size`."""
        self._due: IndexArray = np.full(size, -1, np.intp)
        """The round that a row was filed under last."""
        self._due_of = self._due.data
        self._filed: dict[int, list[list[int]]] = {}
        """By round, the rows that were filed together."""
        self._next = 0

    def file(self, rows: Sequence[int], waits: Sequence[int]) -> None:
        """File `rows[i]`, which is filed nowhere, to be due `waits[i]` rounds after the next one.

        Never before that one, even if its wait is below 0.
        """
        alike: dict[int, list[int]] = {}
        for row, wait in zip(rows, waits, strict=True):
            at = self._due_of[row] = self._next + max(wait, 0)
            alike.setdefault(at, []).append(row)
        for at, those in alike.items():
            self._filed.setdefault(at, []).append(those)

    def file_many(self, rows: IndexArray, waits: IndexArray) -> None:
        """Do what `file` does, with many rows of which most wait alike."""
        waits = np.maximum(waits, ZERO)
        different = set(waits.tolist())
        if len(different) > FEW:
            self.file(rows.tolist(), waits.tolist())
            return
        for wait in different:
            those = rows if len(different) == 1 else rows[waits == scalar(wait)]
            at = self._next + wait
            self._due[those] = at
            self._filed.setdefault(at, []).append(those.tolist())

    def leave(self, row: int) -> None:
        """Forget `row`, filed or not."""
        for rows in self._filed.get(self._due_of[row], ()):  # none if its round has passed
            if row in rows:
                rows.remove(row)

    def take(self, until: int) -> list[int]:
        """Remove and return the rows due in rounds up to `until`, the earliest first."""
        taken: list[int] = []
        for at in range(self._next, until + 1):
            for rows in self._filed.pop(at, ()):
                taken += rows
        self._next = until + 1
        return taken

    def filed(self) -> Iterable[int]:
        """Return the rows that are filed; for checks."""
        return [row for together in self._filed.values() for rows in together for row in rows]

"""Which rows need attention in which round.

A row is filed under the first round in which it can be due, once. It may turn out not
to be due yet, when it was left out of a round in between, and is filed again.
"""

from collections.abc import Iterable, Sequence


class Agenda:
    """Rows, by the round in which they are due."""

    __slots__ = ("_due", "_filed", "_next")

    def __init__(self, max_rows: int) -> None:
        self._due = [-1] * (max_rows + 1)
        # A dict is an ordered set: rows leave by key and come out as they were filed.
        self._filed: dict[int, dict[int, None]] = {}
        self._next = 0

    def file(self, rows: Sequence[int], rounds: Sequence[int]) -> None:
        """File `rows[i]`, which is filed nowhere, under round `rounds[i]`."""
        due, filed = self._due, self._filed
        for row, at in zip(rows, rounds, strict=True):
            due[row] = at
            if at in filed:
                filed[at][row] = None
            else:
                filed[at] = {row: None}

    def leave(self, row: int) -> None:
        """Forget `row`, filed or not."""
        at = self._due[row]
        if at >= 0:
            self._due[row] = -1
            bucket = self._filed[at]
            del bucket[row]
            if not bucket:
                del self._filed[at]

    def take(self, until: int) -> list[int]:
        """Remove and return the rows due in rounds up to `until`, the earliest first."""
        taken: list[int] = []
        for at in range(self._next, until + 1):
            bucket = self._filed.pop(at, None)
            if bucket:
                taken += bucket
        self._next = until + 1
        for row in taken:
            self._due[row] = -1
        return taken

    def filed(self) -> Iterable[int]:
        """Return the rows that are filed; for checks."""
        return [row for bucket in self._filed.values() for row in bucket]

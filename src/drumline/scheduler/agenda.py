"""Which rows need attention in which round.

A row is filed under the first round in which it can be due, once. It may turn out not
to be due yet, when it was left out of a round in between, and is filed again.
"""

from collections.abc import Iterable, Sequence


class Agenda:
    """Rows, by the round in which they are due. The next round is the one behind the last taken."""

    __slots__ = ("_due", "_filed", "_next")

    def __init__(self) -> None:
        self._due: dict[int, int] = {}
        """The round that a row was filed under last."""
        self._filed: dict[int, list[list[int]]] = {}
        """By round, the rows that were filed together."""
        self._next = 0

    def file(self, rows: list[int], waits: Sequence[int]) -> None:
        """File `rows[i]`, which is filed nowhere, to be due `waits[i]` rounds after the next one.

        Never before that one, even if its wait is below 0. `rows` is kept.
        """
        first = waits[0]
        if waits.count(first) == len(waits):
            self._file(rows, first)
            return
        alike: dict[int, list[int]] = {}
        for row, wait in zip(rows, waits, strict=True):
            alike.setdefault(max(wait, 0), []).append(row)
        for wait, those in alike.items():
            self._file(those, wait)

    def _file(self, rows: list[int], wait: int) -> None:
        at = self._next + max(wait, 0)
        self._due.update(dict.fromkeys(rows, at))
        self._filed.setdefault(at, []).append(rows)

    def leave(self, row: int) -> None:
        """Forget `row`, filed or not."""
        for rows in self._filed.get(self._due.get(row, -1), ()):  # none if its round has passed
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

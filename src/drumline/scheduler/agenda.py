"""Which rows need attention in which round.

A row is filed under the first round in which it can be due, once. It may turn out not
to be due yet, when it was left out of a round in between, and is filed again.
"""

from collections.abc import Iterable, Sequence


class Agenda:
    """Rows, by the round in which they are due."""

    __slots__ = ("_due", "_filed", "_next")

    def __init__(self) -> None:
        self._due: dict[int, int] = {}
        """The round that a row was filed under last."""
        # A dict is an ordered set: rows leave by key and come out as they were filed.
        self._filed: dict[int, dict[int, None]] = {}
        self._next = 0

    def file(self, rows: Sequence[int], rounds: Sequence[int]) -> None:
        """File `rows[i]`, which is filed nowhere, under round `rounds[i]`."""
        self._due.update(zip(rows, rounds, strict=True))
        filed, first = self._filed, rounds[0]
        if rounds.count(first) == len(rounds):
            filed.setdefault(first, {}).update(dict.fromkeys(rows))
            return
        for row, at in zip(rows, rounds, strict=True):
            filed.setdefault(at, {})[row] = None

    def leave(self, row: int) -> None:
        """Forget `row`, filed or not."""
        bucket = self._filed.get(self._due.get(row, -1))
        if bucket is not None:  # else its round has passed
            bucket.pop(row, None)

    def take(self, until: int) -> list[int]:
        """Remove and return the rows due in rounds up to `until`, the earliest first."""
        taken: list[int] = []
        for at in range(self._next, until + 1):
            bucket = self._filed.pop(at, None)
            if bucket:
                taken += bucket
        self._next = until + 1
        return taken

    def filed(self) -> Iterable[int]:
        """Return the rows that are filed; for checks."""
        return [row for bucket in self._filed.values() for row in bucket]

"""Which live requests have a deadline, the soonest first.

It knows ids and the relayed clock, and not what becomes of who is late. What it keeps
grows with the live requests, however far away the deadlines are of those that are over.
"""

from heapq import heapify, heappop, heappush

_SPARE = 16
"""Entries of requests that are over which are always kept: fewer are not worth a search."""


class Deadlines:
    """The deadlines of live requests, by id."""

    __slots__ = ("_added", "_heap", "_live")

    def __init__(self) -> None:
        self._added = 0
        self._heap: list[tuple[int, int, str]] = []
        """When each is late, a number that tells owners of one id apart, and the id."""
        self._live: dict[str, tuple[int, int, str]] = {}
        """The entries of those that are not over; the heap has others, too."""

    def __len__(self) -> int:
        """Return how many entries are kept, those of requests that are over included."""
        return len(self._heap)

    def add(self, rid: str, deadline_us: int) -> None:
        """Watch a live request."""
        self._added += 1
        entry = self._live[rid] = (deadline_us, self._added, rid)
        heappush(self._heap, entry)

    def ended(self, rid: str) -> None:
        """Forget a request that is over; one without a deadline is ignored."""
        if self._live.pop(rid, None) is not None and len(self._heap) > (
            2 * len(self._live) + _SPARE
        ):
            self._heap = list(self._live.values())
            heapify(self._heap)

    def late(self, now_us: int) -> list[str]:
        """Return the requests whose deadline has passed, the soonest first, and forget them."""
        found = []
        while self._heap and self._heap[0][0] <= now_us:
            entry = heappop(self._heap)
            if self._live.get(entry[2]) is entry:
                del self._live[entry[2]]
                found.append(entry[2])
        return found

"""Aborts and requests that cross on the wire: which abort is early, and which is late.

An early one ends its request when that arrives; a late one, whose client had not heard of
the end yet, ends no later request of the same id. It knows ids and the relayed clock.
"""

REMEMBERED_US = 30_000_000
"""How long an abort waits for a request that has not arrived, and how long an id that ended
is remembered."""

MAX_REMEMBERED = 65_536
"""Of each; the oldest are forgotten first."""


class Crossings:
    """Aborts without a request, and ids that ended, each until it is forgotten."""

    __slots__ = ("_aborted", "_ended", "_forget_us")

    def __init__(self) -> None:
        # By id, when it is forgotten; soonest first.
        self._aborted: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._forget_us = REMEMBERED_US
        """When an id that ends now is forgotten."""

    def arrived(self, rid: str) -> bool:
        """Note that a request came; whether its abort came before it."""
        self._ended.pop(rid, None)
        return self._aborted.pop(rid, None) is not None

    def ended(self, rid: str) -> None:
        """Note that a request is over."""
        self._ended.pop(rid, None)  # what ends last stands last
        self._ended[rid] = self._forget_us
        _keep_newest(self._ended)

    def aborted(self, rid: str, now_us: int) -> None:
        """Note the abort of a request that is not live."""
        if rid not in self._ended:
            self._aborted[rid] = now_us + REMEMBERED_US
            _keep_newest(self._aborted)

    def expire(self, now_us: int) -> None:
        """Forget what is too old; to be called every round."""
        self._forget_us = now_us + REMEMBERED_US
        for until in (self._aborted, self._ended):
            while until and until[first := next(iter(until))] <= now_us:
                del until[first]


def _keep_newest(until: dict[str, int]) -> None:
    if len(until) > MAX_REMEMBERED:
        del until[next(iter(until))]

"""Which engine of a group takes the next request."""

from collections.abc import Sequence
from typing import Protocol, assert_never

from drumline.core.config import LoadBalance
from drumline.core.errors import RequestError


class Policy(Protocol):
    """Chooses among engines."""

    def choose(self, in_flight: Sequence[int]) -> int:
        """Return an engine's index; `in_flight` has each engine's open requests."""


class RoundRobin:
    """Each engine in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, in_flight: Sequence[int]) -> int:
        index = self._next % len(in_flight)
        self._next = index + 1
        return index


class LeastInFlight:
    """The engine with the fewest open requests; in turn among equals."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, in_flight: Sequence[int]) -> int:
        start = self._turns.choose(in_flight)
        size = len(in_flight)
        return min(
            ((start + step) % size for step in range(size)), key=lambda index: in_flight[index]
        )


def policy_of(method: LoadBalance) -> Policy:
    """Return a fresh policy that balances as the operator chose."""
    match method:
        case LoadBalance.ROUND_ROBIN:
            return RoundRobin()
        case LoadBalance.SHORTEST_QUEUE:
            return LeastInFlight()
        case _:
            assert_never(method)


def pinned(rank: int | None, engines: int) -> int | None:
    """Return the engine that a request's `data_parallel_rank` names, or None for any.

    A lone engine takes everything, whatever the pin says. Raises RequestError for a
    rank that does not exist.
    """
    if rank is None or engines == 1:
        return None
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < engines:
        raise RequestError(
            400,
            f"data_parallel_rank is {rank!r}; it must be a whole number from 0 to {engines - 1}",
            param="data_parallel_rank",
        )
    return rank

"""Which engine of a group takes the next request.

A policy reads what the engines reported and what was sent to them; it knows neither
sockets nor requests beyond their prompts. Reports that are not all fresh say nothing,
and every policy then takes the engines in turn.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from drumline.contract.outputs import Load
from drumline.core.config import LoadBalance
from drumline.core.errors import RequestError, quoted
from drumline.core.hashing import DIGEST_BYTES, page_digests

_REMEMBERED_PAGES = 1 << 16
_MOST_AHEAD = 8
"""How many requests more than the shortest queue one may have and still be sent a prefix it has."""


class Situation(Struct):
    """What is known when a request is to be sent."""

    in_flight: Sequence[int]
    """Open requests of this frontend, by engine."""
    unreported: Sequence[int]
    """Requests sent since an engine's last report, which it cannot have counted, by engine."""
    loads: Sequence[Load]
    """What the engines reported, by engine; empty unless all reports are fresh."""
    prompt: Sequence[int] = ()

    def queues(self) -> list[tuple[int]]:
        """Return how many requests each engine has, whoever sent them, as far as is known."""
        return [
            # A report may be older than what was sent before it; ours are there in any case.
            (max(load.num_running + load.num_waiting + unreported, own),)
            for load, unreported, own in zip(
                self.loads, self.unreported, self.in_flight, strict=True
            )
        ]


class Policy(Protocol):
    """Chooses among engines."""

    def choose(self, now: Situation) -> int:
        """Return an engine's index."""


class RoundRobin:
    """Each engine in turn."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def choose(self, now: Situation) -> int:
        index = self._next % len(now.in_flight)
        self._next = index + 1
        return index

    def cheapest(self, costs: Sequence[tuple[int, ...]]) -> int:
        """Return the engine of the least cost, in turn among equals."""
        least = min(costs)
        size = len(costs)
        start = self._next % size
        index = next(i % size for i in range(start, start + size) if costs[i % size] == least)
        self._next = index + 1
        return index


class ShortestQueue:
    """The engine with the fewest requests."""

    __slots__ = ("_turns",)

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, now: Situation) -> int:
        return self._turns.cheapest(now.queues()) if now.loads else self._turns.choose(now)


class LeastCache:
    """The engine whose running requests hold the fewest pages; of these, the shortest queue."""

    __slots__ = ("_turns",)

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, now: Situation) -> int:
        if not now.loads:
            return self._turns.choose(now)
        pages = [load.kv_active_pages for load in now.loads]
        return self._turns.cheapest(
            [(held, *queue) for held, queue in zip(pages, now.queues(), strict=True)]
        )


class PrefixAware:
    """The engine that was last sent the longest part of a prompt, unless its queue is too long.

    It remembers the digests of the pages of prompts it routed, a bounded number of them,
    and does not know what an engine has dropped since.
    """

    __slots__ = ("_granularity", "_places", "_turns")

    def __init__(self, granularity: int) -> None:
        self._granularity = granularity
        self._turns = RoundRobin()
        self._places: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, now: Situation) -> int:
        pages = self._pages(now.prompt)
        if not now.loads:
            engine = self._turns.choose(now)
        else:
            queues = now.queues()
            known = next(
                (self._places[page] for page in reversed(pages) if page in self._places), None
            )
            if known is None or queues[known][0] > min(queues)[0] + _MOST_AHEAD:
                engine = self._turns.cheapest(queues)
            else:
                engine = known
        self._remember(pages, engine)
        return engine

    def _pages(self, prompt: Sequence[int]) -> list[bytes]:
        if len(prompt) < self._granularity:
            return []
        digests = page_digests(np.array(prompt, np.int32), self._granularity)
        return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]

    def _remember(self, pages: list[bytes], engine: int) -> None:
        for page in pages:
            self._places[page] = engine
            self._places.move_to_end(page)
        while len(self._places) > _REMEMBERED_PAGES:
            self._places.popitem(last=False)


def policy_of(method: LoadBalance, granularity: int) -> Policy:
    """Return the policy of a name; `granularity` is the tokens of a prefix page."""
    match method:
        case LoadBalance.ROUND_ROBIN:
            return RoundRobin()
        case LoadBalance.SHORTEST_QUEUE:
            return ShortestQueue()
        case LoadBalance.MINIMUM_CACHE_USAGE:
            return LeastCache()
        case LoadBalance.PREFIX_AWARE:
            return PrefixAware(granularity)


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
            f"data_parallel_rank is {quoted(rank)}; it must be a whole number from 0 to "
            f"{engines - 1}",
            param="data_parallel_rank",
        )
    return rank


def roomed(room: int | None, engines: int) -> int | None:
    """Return the engine of a bootstrap room, or None without one.

    Prefill and decode servers find each other by it, so both sides must come to the same
    rank, and a pin does not count.
    """
    return None if room is None or engines == 1 else room % engines

"""What the HTTP workers of one server must agree on, as one of them asks for it.

A server with one worker agrees with itself; `workers.link` asks the owner of the engine's link.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest

from drumline.frontend.cache_states import CacheStates
from drumline.frontend.live_requests import LiveRequests


class Desk(Protocol):
    """What is asked of all workers. Thread: the event loop's."""

    def held(
        self, names: Sequence[str] = (), *, counted: bool = False
    ) -> AbstractAsyncContextManager[None]:
        """Keep `names` from other requests, and with `counted` one of the places there are.

        Raises RequestError 409 for a name in use and 429 where no place is left.
        """

    async def abort(self, names: Sequence[str] | None) -> int:
        """End what goes by `names`, or all; return how many answers were still growing."""

    async def metrics(self) -> bytes:
        """Return all metrics as Prometheus' text."""

    async def all_idle(self) -> None:
        """Wait until no worker has a request in flight."""


class OneDesk:
    """The only worker's. Names and places are told apart by its live requests."""

    def __init__(
        self, live: LiveRequests, registry: CollectorRegistry, caches: CacheStates
    ) -> None:
        self._live = live
        self._registry = registry
        self._caches = caches

    @asynccontextmanager
    async def held(
        self, names: Sequence[str] = (), *, counted: bool = False
    ) -> AsyncIterator[None]:
        yield

    async def abort(self, names: Sequence[str] | None) -> int:
        return self._live.abort_named(names)

    async def metrics(self) -> bytes:
        await self._caches.refresh()
        return generate_latest(self._registry)

    async def all_idle(self) -> None:
        await self._live.idle.wait()

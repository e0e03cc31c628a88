"""What engines say of their caches when asked: for `/debug/kv`, and for the metrics.

Asking is a control operation, which an engine answers at a round's end. An engine of
another make may not know it; then there is nothing to show, and nothing fails for it.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from drumline.contract.census import CacheCounters, CacheState, Census, PoolCensus
from drumline.core.errors import PeerError, RequestError
from drumline.frontend.engine_link import EngineLink
from drumline.frontend.web.errors import as_request_error

_decode = msgspec.json.Decoder(CacheState).decode


class PoolView(Struct, frozen=True):
    """A pool's pages and what holds them; `lost` is what the others do not add up to."""

    pages: int
    active: int
    cached: int
    empty: int
    lost: int


class RankView(Struct, frozen=True):
    """The caches of one data-parallel rank; pools are those of device, host and snapshots."""

    dp_rank: int
    pools: dict[str, PoolView]
    suspended_requests: int
    open_operations: int
    counters: CacheCounters


class KvView(Struct, frozen=True):
    """The answer of `/debug/kv`. `conserved` says that no page of any pool is lost."""

    conserved: bool
    ranks: list[RankView]


class CacheStates:
    """The engines' caches as they were when last asked for. Thread: the event loop's."""

    def __init__(self, engine: EngineLink, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self.last: Sequence[CacheState] = ()
        """One for each engine; none if one of them could not tell."""

    async def ask(self) -> None:
        """Bring `last` up to date. Raises RequestError 503 for an engine that does not answer,
        501 for one that has no such operation."""
        self.last = ()
        try:
            replies = await self._engine.call("cache_state", timeout_s=self._timeout_s)
        except PeerError as error:
            if self._engine.closed.is_set():
                raise as_request_error(error) from error
            raise RequestError(503, str(error), code="engine_silent") from error
        try:
            self.last = tuple(_decode(reply.message or "") for reply in replies)
        except msgspec.MsgspecError:
            said = next((reply.message for reply in replies if not reply.success), "")
            raise RequestError(
                501, f"this engine does not tell where its pages are: {said}", code="unsupported"
            ) from None

    async def refresh(self) -> None:
        """Bring `last` up to date as far as that is possible."""
        try:
            await self.ask()
        except RequestError:
            return

    def view(self) -> KvView:
        """Return what was last told, for a person."""
        ranks = [
            RankView(
                rank,
                {name: _pool(getattr(state.pools, name)) for name in Census.__struct_fields__},
                state.suspended_requests,
                state.open_operations,
                state.counters,
            )
            for rank, state in enumerate(self.last)
        ]
        lost = any(pool.lost for rank in ranks for pool in rank.pools.values())
        return KvView(not lost, ranks)


def _pool(census: PoolCensus) -> PoolView:
    return PoolView(census.pages, census.active, census.cached, census.empty, census.lost)

"""Where the pages of an engine are, and what its cache tiers did: what operators are told.

A census is taken of what a pool's blocks say of themselves, not of how many should be
where: pages that nothing accounts for show as lost.
"""

from msgspec import Struct


class PoolCensus(Struct, frozen=True):
    """A pool's pages by what holds them, the null page not counted."""

    pages: int
    active: int
    """Held by a request, an operation or an image."""
    cached: int
    """Findable, and held by nobody."""
    empty: int

    @property
    def lost(self) -> int:
        """Pages that are nowhere, or less than none if some are in two places."""
        return self.pages - self.active - self.cached - self.empty


class Census(Struct, frozen=True):
    """The pools of one rank. In the snapshot pool nothing is only cached."""

    device: PoolCensus
    host: PoolCensus
    snapshot: PoolCensus


class TierCounters(Struct):
    """What was copied to and from one tier, since the start."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0


class CacheCounters(Struct):
    """What cache operations did, since the start. Operations count once they are done."""

    host: TierCounters
    snapshot: TierCounters
    stores: int = 0
    """Operations that copied pages to the host tier."""
    loads: int = 0
    hit_tokens: int = 0
    """Tokens of prefixes that were found in the host tier, summed over the groups."""
    cached_tokens: int = 0
    """Prompt tokens of admitted requests that were found in either tier."""
    retractions: int = 0
    restores: int = 0
    failed: int = 0
    aborts: int = 0
    """Requests that a plan ended, for want of room or because a load failed."""


class CacheState(Struct, frozen=True):
    """Where a replica's pages are, and what was moved; the answer of `cache_state`, as JSON."""

    pools: Census
    suspended_requests: int
    open_operations: int
    counters: CacheCounters

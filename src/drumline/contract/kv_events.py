"""What became findable in the KV pool, or ceased to be, as routers outside learn it.

A prefix page is named by a hash of its own kind, over its tokens and the hash of the page
before it (`core.hashing.event_hash`), so that readers can compute it too.
"""

from msgspec import Struct


class BlockStored(Struct, frozen=True, tag="stored"):
    """A page is cached in every cache group; a tail has fewer tokens than a page."""

    block_hash: int
    parent_hash: int | None
    token_ids: tuple[int, ...]


class BlockRemoved(Struct, frozen=True, tag="removed"):
    """A page is no longer cached in every cache group."""

    block_hash: int


KvEvent = BlockStored | BlockRemoved

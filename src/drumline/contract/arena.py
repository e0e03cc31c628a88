"""Host memory that tiers share: where it is and how it is laid out.

It names memory and owns none; whoever made the arena keeps it for as long as the
engine lives.
"""

from enum import StrEnum

from msgspec import Struct


class ArenaTier(StrEnum):
    """What host memory is for."""

    HOST = "host"
    """Prefix pages, findable by their hash."""
    SNAPSHOT = "snapshot"
    """What suspended requests have beyond the host tier; each page is one request's alone."""


class PageLayout(Struct, frozen=True):
    """How the bytes of one block lie in host memory.

    A block is contiguous: `fields` parts of `field_bytes` each, layer by layer, the keys
    before the values. `tag` says what a part's bytes mean, and is compared whenever stored
    pages are read: pages of another tag are foreign, whatever their size.
    """

    tag: str
    fields: int
    field_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.fields * self.field_bytes


class HostArena(Struct, frozen=True):
    """Host memory as whoever copies into or out of it must know it.

    Block `b`, counted from 1, lies at `address + (b - 1) * layout.block_bytes`; the null
    block has no memory.
    """

    address: int
    size: int
    layout: PageLayout
    tier: ArenaTier

    @property
    def blocks(self) -> int:
        return self.size // self.layout.block_bytes

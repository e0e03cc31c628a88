"""What operators may see of a rank, and what of it they may set, while it serves."""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

Limit = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class Adjustments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that may change, under the names of their flags; what is unset stays.

    Null takes a limit away. No answer depends on any of them.
    """

    chunked_prefill_size: Limit | UnsetType = UNSET
    """At most what the rank started with: its memory was laid out for that."""
    mixed_batch: bool | UnsetType = UNSET
    mixed_prefill_tokens: Limit | UnsetType | None = UNSET
    max_num_queued_reqs: Limit | UnsetType | None = UNSET
    max_num_queued_tokens: Limit | UnsetType | None = UNSET


class InternalState(Struct, frozen=True, kw_only=True):
    """How a replica stands in this round; its members would all say the same."""

    round: int
    standing: str
    """`serving`, `draining`, `paused`, `kept`, `releasing`, `asleep`, `unloaded`, `lost`."""
    released: tuple[str, ...]
    """Memory that is given back, by tags."""
    weight_version: str
    profiling: bool
    withheld: int
    """Requests that arrived while it did not serve."""
    in_flight: int
    """Forwards that await their commit."""
    running: int
    waiting: int
    settings: Adjustments
    """What may be set, as it is now."""

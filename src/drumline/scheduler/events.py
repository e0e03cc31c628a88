"""What goes into the scheduler: requests, and what happened to them since the last plan."""

from msgspec import Struct

from drumline.contract.arrays import IntArray
from drumline.contract.cache import CacheAck
from drumline.core.errors import InvariantError


class RequestSpec(Struct, frozen=True, kw_only=True, eq=False):
    """A request as the scheduler plans it.

    `max_new_tokens` is 0 where the request declares no bound. `page_digests` are the
    32-byte digests of the prompt's full prefix pages, concatenated; empty, the
    scheduler computes them.
    """

    rid: str
    tokens: IntArray
    max_new_tokens: int = 0
    max_cached_prefix_tokens: int = (1 << 31) - 1
    page_digests: bytes = b""
    cache_salt: str = ""
    priority: int = 0
    """Higher goes first, where the policy asks for it."""


class Results(Struct, frozen=True, eq=False):
    """A committed forward's tokens, by the rows of its batch.

    One entry a batch row in `rows`, `generations` and `counts`; `tokens` is flat.
    Rows whose generation has passed belong to requests that are gone: ignored.
    """

    rows: IntArray
    generations: IntArray
    counts: IntArray
    tokens: IntArray


class Finished(Struct, frozen=True):
    """The request ended by itself; its pages stay findable. Unknown rids are ignored."""

    rid: str


class Aborted(Struct, frozen=True):
    """The request is over now; nothing of it is published. Unknown rids are ignored."""

    rid: str


Event = Results | Finished | Aborted
"""What the tail of a round advances by."""


class Tick(Struct, frozen=True, kw_only=True):
    """The agreed time and what is allowed from now on, until the next tick."""

    now_us: int = 0
    allow_forward: bool = True


HeadEvent = Tick | CacheAck
"""What the head of a round advances by; acknowledgments are those that all members agree on."""


class IllegalTransitionError(InvariantError):
    """An event met a request in a state that cannot take it; nothing changed."""


class Sizes(Struct, frozen=True):
    """How many requests are in which state."""

    waiting: int
    prefilling: int
    decoding: int
    finishing: int
    retracted: int = 0
    """Of those waiting: suspended, or on their way back."""

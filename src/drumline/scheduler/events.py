"""What goes into the scheduler: requests, and what happened to them since the last plan."""

from msgspec import Struct

from drumline.contract.arrays import IntArray
from drumline.contract.cache import CacheAck
from drumline.contract.storage import StorageDone, StoragePressure
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


class Reserved(Struct, frozen=True):
    """The request's next decode is to have room for `tokens`, that one alone.

    Unknown rids are ignored.
    """

    rid: str
    tokens: int


class Bootstrapped(Struct, frozen=True):
    """The peers of a disaggregated engine's request found each other. Repeats are ignored."""

    rid: str


class RemotePrefilled(Struct, frozen=True):
    """All of a prompt's cache is here, with the first token of the answer, and no peer writes
    any more. Repeats are ignored."""

    rid: str
    token: int


class RemoteSucceeded(Struct, frozen=True):
    """The decode engine has a prompt's whole cache, and no transfer reads it any more."""

    rid: str


class RemoteFailed(Struct, frozen=True):
    """The transfer of a request failed or was given up, and no peer touches its blocks any
    more: the request is over. Unknown rids are ignored."""

    rid: str


Event = (
    Results
    | Finished
    | Aborted
    | Reserved
    | Bootstrapped
    | RemotePrefilled
    | RemoteSucceeded
    | RemoteFailed
)
"""What the tail of a round advances by."""


class Tick(Struct, frozen=True, kw_only=True):
    """The agreed time and what is allowed from now on, until the next tick.

    With a storage tier, its time never goes back, and one a round tells the worst pressure
    of the replica's members.
    """

    now_us: int = 0
    allow_forward: bool = True
    allow_storage: bool = False
    """Whether storage may be asked for anything new."""
    pressure: StoragePressure = StoragePressure()


class StorageDetached(Struct, frozen=True):
    """The request waits for storage no longer: it is admitted with what there is.

    Ignored where it does not wait.
    """

    rid: str


HeadEvent = Tick | CacheAck | StorageDone | StorageDetached
"""What the head of a round advances by; all of it is what the members agree on."""


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
    bootstrapping: int = 0
    """Requests whose peers have not found each other."""
    transferring: int = 0
    """Requests whose blocks a peer reads or writes, and that do nothing else."""

    @property
    def live(self) -> int:
        """Requests in any state but those that hold nothing any more."""
        return (
            self.waiting
            + self.prefilling
            + self.decoding
            + self.finishing
            + self.bootstrapping
            + self.transferring
        )


class StorageStats(Struct, frozen=True, kw_only=True):
    """How the storage tier's transactions stand, and what was given up since the start."""

    operations: int = 0
    quarantined: int = 0
    """Of those, answered without proof that no worker touches their blocks any more."""
    held_blocks: int = 0
    waiting_requests: int = 0
    ready_requests: int = 0
    """Requests with pages in host memory that are held for their admission."""
    backup_candidates: int = 0
    bad_objects: int = 0
    gate_closed: bool = False
    pressure_bypasses: int = 0
    """Requests that went on without storage because it was too far behind."""
    wait_timeouts: int = 0
    ready_expirations: int = 0
    pressure_drops: int = 0
    """Candidates that were not stored because storage was too far behind."""
    overflow_drops: int = 0
    """… because too many waited."""
    unavailable_drops: int = 0
    """… because host memory had them no more."""
    disabled_drops: int = 0
    """… because no operation is to spare for storing."""

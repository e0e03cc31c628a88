"""Storage operations under way: their ids, their host blocks, what waits for their answers.

The host blocks of an operation stay held until it is answered as retired, whatever
became of whoever wanted it: a worker may still touch them. An operation that is answered
without that proof is quarantined, and its blocks with it: no time-out frees them, only a
later answer that has the proof.
"""

from collections.abc import Callable
from enum import IntEnum

from msgspec import Struct

from drumline.contract.storage import (
    StorageCancel,
    StorageDone,
    StorageGet,
    StorageKey,
    StoragePut,
    StorageQuery,
)
from drumline.core.errors import InvariantError
from drumline.scheduler.draft import Draft
from drumline.scheduler.host import HostTier
from drumline.scheduler.index import NOBODY, IndexArray


class Kind(IntEnum):
    """What an operation does."""

    QUERY = 0
    GET = 1
    PUT = 2


Ended = Callable[[IndexArray, StorageDone], None]
"""Takes an operation's blocks, still held, and its answer."""


class _Operation(Struct, eq=False):
    kind: Kind
    keys: tuple[StorageKey, ...]
    blocks: IndexArray
    ended: Ended | None
    """None once nobody wants the answer."""
    quarantined: bool = False


class Operations:
    """Operations that are planned and not retired."""

    __slots__ = ("_cancels", "_host", "_next", "_open", "held", "held_by_puts", "puts")

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._next = 1
        self._open: dict[int, _Operation] = {}
        self._cancels: list[int] = []
        self.held = 0
        """Host blocks that operations hold."""
        self.held_by_puts = 0
        self.puts = 0
        """Operations that store something."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def quarantined(self) -> int:
        return sum(op.quarantined for op in self._open.values())

    @property
    def unanswered(self) -> int:
        """Operations whose answer is still to come."""
        return len(self._open) - self.quarantined

    def query(self, keys: tuple[StorageKey, ...], ended: Ended, draft: Draft) -> int:
        """Plan a query; returns its id."""
        op_id = self._begin(Kind.QUERY, keys, NOBODY, ended)
        draft.storage(StorageQuery(op_id, keys))
        return op_id

    def get(
        self, keys: tuple[StorageKey, ...], blocks: IndexArray, ended: Ended, draft: Draft
    ) -> int:
        """Plan reading `keys[i]` to host block `blocks[i]`, held from now on; returns its id."""
        op_id = self._begin(Kind.GET, keys, blocks, ended)
        draft.storage(StorageGet(op_id, keys, self._pages(keys, blocks)))
        return op_id

    def put(
        self, keys: tuple[StorageKey, ...], blocks: IndexArray, ended: Ended, draft: Draft
    ) -> None:
        """Plan storing host block `blocks[i]`, held from now on, as `keys[i]`."""
        self.puts += 1
        self.held_by_puts += len(blocks)
        op_id = self._begin(Kind.PUT, keys, blocks, ended)
        draft.storage(StoragePut(op_id, keys, self._pages(keys, blocks)))

    def _begin(
        self, kind: Kind, keys: tuple[StorageKey, ...], blocks: IndexArray, ended: Ended
    ) -> int:
        op_id = self._next
        self._next += 1
        self._open[op_id] = _Operation(kind, keys, blocks, ended)
        self.held += len(blocks)
        return op_id

    def _pages(self, keys: tuple[StorageKey, ...], blocks: IndexArray) -> tuple[int, ...]:
        base = self._host.pool.base
        return tuple(
            block - base[key.group] for key, block in zip(keys, blocks.tolist(), strict=True)
        )

    def cancel(self, op_id: int) -> None:
        """Stop wanting an operation's answer; the next plan says so to the workers."""
        self._open[op_id].ended = None
        self._cancels.append(op_id)

    def plan_cancels(self, draft: Draft) -> None:
        """Put into the plan what was cancelled and is not answered since."""
        for op_id in self._cancels:
            op = self._open.get(op_id)
            if op is not None and not op.quarantined:
                draft.storage(StorageCancel(op_id))
        self._cancels.clear()

    def answer(self, done: StorageDone) -> None:
        """Take an operation's answer. Unknown ids, and those retired before, are ignored.

        Raises InvariantError where the answer is not about the operation's keys.
        """
        op = self._open.get(done.op_id)
        if op is None:
            return
        if len(done.success) != len(op.keys) or len(done.failed) not in (0, len(op.keys)):
            raise InvariantError(
                f"storage operation {done.op_id} has {len(op.keys)} keys, its answer is about "
                f"{len(done.success)} and {len(done.failed)}"
            )
        ended, op.ended = op.ended, None
        if not done.retired:
            # What such an operation claims to have done counts for nothing.
            op.quarantined = True
            done = StorageDone(op_id=done.op_id, success=(False,) * len(op.keys), retired=False)
        if ended is not None:
            ended(op.blocks, done)
        if done.retired:
            self._retire(done.op_id, op)

    def _retire(self, op_id: int, op: _Operation) -> None:
        del self._open[op_id]
        self.held -= len(op.blocks)
        if op.kind is Kind.PUT:
            self.puts -= 1
            self.held_by_puts -= len(op.blocks)
        if len(op.blocks):
            self._host.let_go_of(op.blocks)

    def blocks(self) -> list[IndexArray]:
        """Return the host blocks that operations hold, an operation an entry."""
        return [op.blocks for op in self._open.values()]

    def check(self) -> None:
        """Raise InvariantError unless the counts are those of the operations."""
        puts = [op for op in self._open.values() if op.kind is Kind.PUT]
        counts = (self.held, self.puts, self.held_by_puts)
        if counts != (
            sum(len(op.blocks) for op in self._open.values()),
            len(puts),
            sum(len(op.blocks) for op in puts),
        ):
            raise InvariantError(f"storage operations are counted {counts}, and are others")

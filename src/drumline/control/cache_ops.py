"""The open cache operations of this rank, and which of them its replica agrees are done.

The members of a replica run mirrored schedulers, which must learn of a copy's end in
the same round; but each member's copies land when they land. A member that is early
keeps its acknowledgments here until the slowest one has them too.

It does not know what the operations are for, nor when a round polls.
"""

from collections.abc import Iterable, Sequence
from itertools import starmap

import msgspec
from msgspec import Struct

from drumline.contract.cache import (
    BlockMoves,
    CacheAck,
    CacheOp,
    LoadBack,
    Restore,
    Snapshot,
    WriteBack,
)
from drumline.contract.census import CacheCounters, CacheState, TierCounters
from drumline.contract.ports import Group, Reduce
from drumline.contract.specs import DeviceSpecs
from drumline.core.errors import InvariantError, PeerError
from drumline.scheduler.scheduler import Scheduler


class _View(Struct, frozen=True):
    """What one member holds, and what is wrong with it."""

    acks: list[CacheAck]
    fault: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_View).decode


class CacheOps:
    """Operations that a plan named and that are not done everywhere."""

    __slots__ = (
        "_block_bytes",
        "_block_tokens",
        "_early",
        "_open",
        "_replica",
        "counters",
    )

    def __init__(self, replica: Group, specs: DeviceSpecs) -> None:
        self._replica = replica
        self._block_bytes = [
            specs.bytes_per_page // group.blocks_per_parent for group in specs.groups
        ]
        self._block_tokens = [group.block_tokens for group in specs.groups]
        self._open: dict[int, CacheOp] = {}
        self._early: dict[int, CacheAck] = {}
        """This member's acknowledgments that another member still lacks."""
        self.counters = CacheCounters(TierCounters(), TierCounters())

    @property
    def open(self) -> int:
        """Operations dispatched and not done; the same on every member."""
        return len(self._open)

    def state(self, scheduler: Scheduler) -> CacheState:
        """Return where all pages are now."""
        return CacheState(
            pools=scheduler.census(),
            suspended_requests=scheduler.sizes().retracted,
            open_operations=self.open,
            counters=self.counters,
        )

    def dispatched(self, ops: Sequence[CacheOp]) -> None:
        """Note the operations of the plan that the data plane is handed in this round."""
        for op in ops:
            if op.op_id in self._open:
                raise InvariantError(f"a plan names cache operation {op.op_id} a second time")
            self._open[op.op_id] = op

    def acknowledged(self, polled: Iterable[CacheAck]) -> list[CacheAck]:
        """Add this member's acknowledgments; return those that every member has, by op id.

        An operation that failed on any member failed on all. Collective: every member of
        the replica, in every round in which operations are open. Raises InvariantError, on
        every member alike, for an acknowledgment of no open operation or a second one, and
        PeerError for a member that sends something else.
        """
        fault = self._add(polled)
        mine = bool(self._early or fault)
        if self._replica.size > 1:
            # Most rounds nobody has any: one number tells.
            (any_work,) = self._replica.all_reduce([int(mine)], Reduce.MAX)
            mine = bool(any_work)
        if not mine:
            return []
        view = _View(list(self._early.values()), fault)
        views = list(starmap(_view, enumerate(self._replica.all_gather(_encode(view)))))
        for member, theirs in enumerate(views):
            if theirs.fault:
                raise InvariantError(f"member {member} of the replica: {theirs.fault}")
        done = set.intersection(*({ack.op_id for ack in theirs.acks} for theirs in views))
        failed = {ack.op_id for theirs in views for ack in theirs.acks if not ack.ok}
        return [self._close(op_id, op_id not in failed) for op_id in sorted(done)]

    def _add(self, polled: Iterable[CacheAck]) -> str:
        """Keep acknowledgments; returns what is wrong with one of them, if anything is."""
        fault = ""
        for ack in polled:
            if ack.op_id in self._early:
                fault = f"cache operation {ack.op_id} is acknowledged twice"
            elif ack.op_id not in self._open:
                fault = f"cache operation {ack.op_id} is acknowledged and not open"
            else:
                self._early[ack.op_id] = ack
        return fault

    def _close(self, op_id: int, ok: bool) -> CacheAck:
        del self._early[op_id]
        op = self._open.pop(op_id)
        if ok:
            self._count(op)
        else:
            self.counters.failed += 1
        return CacheAck(op_id, ok)

    def _count(self, op: CacheOp) -> None:
        counters = self.counters
        match op:
            case WriteBack():
                counters.stores += 1
                self._stored(counters.host, op.moves)
            case LoadBack():
                counters.loads += 1
                self._loaded(counters.host, op.moves)
                counters.hit_tokens += sum(
                    len(move.targets) * self._block_tokens[move.group] for move in op.moves
                )
            case Snapshot():
                counters.retractions += 1
                self._stored(counters.snapshot, op.moves)
            case Restore():
                counters.restores += 1
                self._loaded(counters.host, op.from_host)
                self._loaded(counters.snapshot, op.from_snapshot)

    def _stored(self, tier: TierCounters, moves: Iterable[BlockMoves]) -> None:
        for move in moves:
            tier.stored_blocks += len(move.targets)
            tier.stored_bytes += len(move.targets) * self._block_bytes[move.group]

    def _loaded(self, tier: TierCounters, moves: Iterable[BlockMoves]) -> None:
        for move in moves:
            tier.loaded_blocks += len(move.targets)
            tier.loaded_bytes += len(move.targets) * self._block_bytes[move.group]


def _view(member: int, payload: bytes) -> _View:
    """Return what a member of the replica holds. Raises PeerError naming it."""
    try:
        return _decode(payload)
    except msgspec.DecodeError as error:
        raise PeerError(f"member {member} sent no view of its cache operations: {error}") from None

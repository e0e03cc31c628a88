"""Blocks that are not in the KV pool: the host tier and the images of suspended requests.

It carries out a plan's cache operations and says when each is done. It does not know
why a block moves, nor what is findable where; that a plan's operations run in an order
is the handle's business, for which they are offered in parts here.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from msgspec import Struct
from torch import Tensor

from drumline.contract.arena import ArenaTier, HostArena
from drumline.contract.cache import (
    BlockMoves,
    CacheAck,
    CacheOp,
    LoadBack,
    Restore,
    Snapshot,
    WriteBack,
)
from drumline.contract.ports import Clock
from drumline.core.errors import InvariantError
from drumline.device.copying import Task
from drumline.device.host_pool import HostPool
from drumline.device.kv import KvPool
from drumline.device.stream_copies import StreamCopies
from drumline.device.thread_copies import ThreadCopies


class HostSizes(Struct, frozen=True):
    """How much there is of each tier; pages count the null page, so 1 is no pool."""

    host_pages: int = 1
    snapshot_pages: int = 1
    max_retracted: int = 0


class RowStates(Protocol):
    """Whoever keeps something of a row between its forwards."""

    row_words: int
    """How many 64-bit words a row's state has."""

    def export_row(self, row: int, state: Tensor) -> None:
        """Write a row's state to `state`, int64 `[row_words]`, where the pool lies."""

    def import_row(self, row: int, state: Tensor) -> None:
        """Give a row the state that `export_row` wrote, of whichever row."""


class Load(Protocol):
    """What a plan loads for its own forward: which layers of it are there.

    It is handed to that forward and to no other, which is how a forward never waits for
    another plan's load.
    """

    def wait(self, layer: int) -> None:
        """Let nothing that follows run before a layer's keys and values are in the pool."""

    def wait_all(self) -> None:
        """Let nothing that follows run before all of it is in the pool."""


class Copies(Protocol):
    """How blocks get from the KV pool to a host tier and back.

    `ended` is called once, on any thread, when the blocks are where they were to be.

    Thread: forward thread, but for `check`.
    """

    def store(self, pool: HostPool, moves: Iterable[BlockMoves], ended: Task) -> None:
        """Copy what is given away: nothing that follows writes there before it was read."""

    def begin_store(self, pool: HostPool, moves: Iterable[BlockMoves], ended: Task) -> None:
        """Begin to copy what stays as it is until `ended`."""

    def load(self, pool: HostPool, moves: Sequence[BlockMoves], ended: Task) -> Load | None:
        """Begin to copy to the KV pool; returns what to wait for, or None if it is there."""

    def restore(self, parts: Sequence[tuple[HostPool, Iterable[BlockMoves]]], ended: Task) -> None:
        """Begin to copy to the KV pool, from some tiers, what nobody reads before `ended`."""

    def check(self) -> None:
        """Report what takes long. Raises InvariantError once a copy failed. Thread: any."""

    def stop(self) -> None:
        """Finish what was begun, then end the threads. Idempotent."""


class HostCache:
    """The host tiers and the row states beside them.

    Thread: forward thread, but for `poll`.
    """

    __slots__ = ("_copies", "_host", "_landed", "_rows", "_snapshots", "_states")

    def __init__(
        self, kv: KvPool, rows: RowStates, sizes: HostSizes, threads: int, clock: Clock
    ) -> None:
        self._rows = rows
        self._host = _pool(kv, sizes.host_pages, ArenaTier.HOST)
        self._snapshots = _pool(kv, sizes.snapshot_pages, ArenaTier.SNAPSHOT)
        # By slot, from 1.
        slots = sizes.max_retracted + 1, rows.row_words
        self._states = torch.zeros(slots, dtype=torch.int64, device=kv.device)
        self._landed: deque[CacheAck] = deque()
        self._copies: Copies
        if self.arenas and kv.device.type == "cuda":
            self._copies = StreamCopies(kv, clock)
        else:
            self._copies = ThreadCopies(kv, threads if self.arenas else 0, clock)

    @property
    def arenas(self) -> tuple[HostArena, ...]:
        """The host memory of every tier there is."""
        return tuple(pool.arena for pool in (self._host, self._snapshots) if pool is not None)

    def poll(self) -> list[CacheAck]:
        """Return the operations that are done and were not returned before. Thread: any."""
        self._copies.check()
        return [self._landed.popleft() for _ in range(len(self._landed))]

    def stop(self) -> None:
        """Finish what is being copied, then end the threads that do."""
        self._copies.stop()

    def store_ordered(self, ops: Sequence[CacheOp]) -> None:
        """Copy what a plan may give away in the same breath: before anything else of it."""
        for op in ops:
            if isinstance(op, WriteBack) and not op.pinned:
                self._copies.store(self._of(self._host, op), op.moves, partial(self._land, op))
            elif isinstance(op, Snapshot):
                pool = self._of(self._snapshots, op) if op.moves else None
                self._rows.export_row(op.row, self._states[self._slot(op)])
                ended = partial(self._land, op)
                if pool is not None:
                    self._copies.store(pool, op.moves, ended)
                else:
                    ended()

    def store_pinned(self, ops: Sequence[CacheOp]) -> None:
        """Begin to copy what stays as it is until the operation is acknowledged."""
        for op in ops:
            if isinstance(op, WriteBack) and op.pinned:
                pool = self._of(self._host, op)
                self._copies.begin_store(pool, op.moves, partial(self._land, op))

    def load(self, ops: Sequence[CacheOp]) -> Load | None:
        """Begin to copy blocks to the device: those that the plan's forward reads, then restores.

        Returns what the forward is to wait for, layer by layer, or None if there is nothing, or
        it was little and is there. Nobody reads a restored request's blocks before the
        acknowledgment; its state is in place at once.
        """
        loads = [op for op in ops if isinstance(op, LoadBack)]
        fence = None
        if loads:
            moves = [move for op in loads for move in op.moves]
            ended = partial(self._land, *loads)
            fence = self._copies.load(self._of(self._host, loads[0]), moves, ended)
        for op in ops:
            if isinstance(op, Restore):
                self._rows.import_row(op.row, self._states[self._slot(op)])
                self._begin_restore(op)
        return fence

    def _begin_restore(self, op: Restore) -> None:
        parts = [
            (self._of(pool, op), moves)
            for pool, moves in ((self._host, op.from_host), (self._snapshots, op.from_snapshot))
            if moves
        ]
        if parts:
            self._copies.restore(parts, partial(self._land, op))
        else:
            self._land(op)

    def _land(self, *ops: CacheOp) -> None:
        self._landed.extend(CacheAck(op.op_id) for op in ops)

    def _of(self, pool: HostPool | None, op: CacheOp) -> HostPool:
        if pool is None:
            raise InvariantError(f"{type(op).__name__} {op.op_id} needs a pool that is not there")
        return pool

    def _slot(self, op: Snapshot | Restore) -> int:
        if not 1 <= op.slot < len(self._states):
            raise InvariantError(
                f"there are {len(self._states) - 1} slots for suspended requests, not {op.slot}"
            )
        return op.slot


def _pool(kv: KvPool, pages: int, tier: ArenaTier) -> HostPool | None:
    return HostPool(kv, pages - 1, tier) if pages > 1 else None

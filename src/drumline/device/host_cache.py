"""Blocks that are not in the KV pool: the host tier and the images of suspended requests.

It carries out a plan's cache operations and says when each is done. It does not know
why a block moves, nor what is findable where; that a plan's operations run in an order
is the handle's business, for which they are offered in parts here.

A host block lies in one piece, all layers' keys and values one behind the other, so
that a block is one copy here, one object for a tier further away, and a stretch of
neighbours is one copy too.
"""

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from drumline.contract.arena import ArenaTier, HostArena, PageLayout
from drumline.contract.arrays import IntArray
from drumline.contract.cache import (
    BlockMoves,
    CacheAck,
    CacheOp,
    LoadBack,
    Restore,
    Snapshot,
    WriteBack,
)
from drumline.core.errors import InvariantError
from drumline.device.kv import KvPool
from drumline.device.memory import host_memory

_EMPTY = 0
"""The stamp of a host block that nothing was ever stored in."""


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
        """Write a row's state to `state`, int64 `[row_words]`, in host memory."""

    def import_row(self, row: int, state: Tensor) -> None:
        """Give a row the state that `export_row` wrote, of whichever row."""


class HostPool:
    """Blocks of one tier in host memory, numbered from 1.

    Each block carries the stamp of the layout it was stored in. A block of another
    layout, or one that was never stored, is not read.
    """

    __slots__ = ("_blocks", "_stamp", "_stamps", "arena")

    def __init__(self, kv: KvPool, blocks: int, tier: ArenaTier, *, pinned: bool = False) -> None:
        layout = kv.layout
        memory = host_memory(blocks * layout.block_bytes, pinned=pinned)
        self.arena = HostArena(memory.data_ptr(), memory.numel(), layout, tier)
        self._blocks = memory.view(blocks, layout.fields, layout.field_bytes)
        self._stamp = _stamp(layout)
        self._stamps = np.full(blocks + 1, _EMPTY, np.uint32)

    def store(self, kv: KvPool, moves: Iterable[BlockMoves]) -> None:
        """Copy blocks of the KV pool into this one."""
        targets, sources = [], []
        for move in moves:
            self._check(move.targets)
            self._stamps[move.targets] = self._stamp
            for source, target, count in _stretches(move.sources, move.targets):
                theirs, mine = self._pair(kv, source, target, count)
                targets.append(mine)
                sources.append(theirs)
        _copy(targets, sources)

    def load(self, kv: KvPool, moves: Iterable[BlockMoves]) -> None:
        """Copy blocks of this pool into the KV pool.

        Raises InvariantError for a block that holds nothing of the KV pool's layout.
        """
        targets, sources = [], []
        for move in moves:
            self._check(move.sources)
            foreign = move.sources[self._stamps[move.sources] != self._stamp]
            if len(foreign):
                raise InvariantError(
                    f"{self.arena.tier} block {int(foreign[0])} holds no page of layout "
                    f"{kv.layout.tag!r}"
                )
            for source, target, count in _stretches(move.sources, move.targets):
                theirs, mine = self._pair(kv, target, source, count)
                targets.append(theirs)
                sources.append(mine)
        _copy(targets, sources)

    def _pair(self, kv: KvPool, device: int, host: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the bytes of neighbours in the KV pool and of as many here."""
        if count == 1:
            # Scattered blocks are many, and this is half the work.
            return kv.block(device), self._blocks.select(0, host - 1)
        return kv.stretch(device, count), self._blocks.narrow(0, host - 1, count)

    def _check(self, blocks: IntArray) -> None:
        if not len(blocks):
            return
        least, most = min(blocks.data), max(blocks.data)
        if least < 1 or most >= len(self._stamps):
            raise InvariantError(
                f"the {self.arena.tier} pool has blocks 1 to {len(self._stamps) - 1}, "
                f"not {least} to {most}"
            )


def _stamp(layout: PageLayout) -> int:
    named = f"{layout.tag} {layout.fields} {layout.field_bytes}"
    return zlib.crc32(named.encode()) or 1


def _stretches(sources: IntArray, targets: IntArray) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, count) of stretches in which both count up by one."""
    source = target = count = 0
    # Plain ints: most operations have few blocks, and are over sooner than a vector begins.
    for here, there in zip(sources.data, targets.data, strict=True):
        if here == source + count and there == target + count and count:
            count += 1
            continue
        if count:
            yield source, target, count
        source, target, count = here, there, 1
    if count:
        yield source, target, count


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of `sources` onto its target, in one call that holds no interpreter lock."""
    if targets:
        torch._foreach_copy_(targets, sources)


class HostCache:
    """The host tiers and the row states beside them.

    Thread: forward thread, but for `poll`.
    """

    __slots__ = ("_host", "_kv", "_landed", "_rows", "_snapshots", "_states")

    def __init__(
        self, kv: KvPool, rows: RowStates, sizes: HostSizes, *, pinned: bool = False
    ) -> None:
        self._kv = kv
        self._rows = rows
        self._host = _pool(kv, sizes.host_pages, ArenaTier.HOST, pinned)
        self._snapshots = _pool(kv, sizes.snapshot_pages, ArenaTier.SNAPSHOT, pinned)
        # By slot, from 1.
        self._states = torch.zeros((sizes.max_retracted + 1, rows.row_words), dtype=torch.int64)
        self._landed: deque[CacheAck] = deque()

    @property
    def arenas(self) -> tuple[HostArena, ...]:
        """The host memory of every tier there is."""
        return tuple(pool.arena for pool in (self._host, self._snapshots) if pool is not None)

    def poll(self) -> list[CacheAck]:
        """Return the operations that are done and were not returned before. Thread: any."""
        return [self._landed.popleft() for _ in range(len(self._landed))]

    def store_ordered(self, ops: Sequence[CacheOp]) -> None:
        """Copy what a plan may give away in the same breath: before anything else of it."""
        for op in ops:
            if isinstance(op, WriteBack) and not op.pinned:
                self._of(self._host, op).store(self._kv, op.moves)
                self._land(op)
            elif isinstance(op, Snapshot):
                if op.moves:
                    self._of(self._snapshots, op).store(self._kv, op.moves)
                self._rows.export_row(op.row, self._states[self._slot(op)])
                self._land(op)

    def store_pinned(self, ops: Sequence[CacheOp]) -> None:
        """Copy what stays as it is until the operation is acknowledged: any time after."""
        for op in ops:
            if isinstance(op, WriteBack) and op.pinned:
                self._of(self._host, op).store(self._kv, op.moves)
                self._land(op)

    def load(self, ops: Sequence[CacheOp]) -> None:
        """Copy blocks to the device: those that the plan's forward reads, then restores.

        All of it is there when this returns, so that no layer of the forward has a load to
        wait for: copying and computing share the same cores.
        """
        for op in ops:
            if isinstance(op, LoadBack):
                self._of(self._host, op).load(self._kv, op.moves)
                self._land(op)
        for op in ops:
            if isinstance(op, Restore):
                if op.from_host:
                    self._of(self._host, op).load(self._kv, op.from_host)
                if op.from_snapshot:
                    self._of(self._snapshots, op).load(self._kv, op.from_snapshot)
                self._rows.import_row(op.row, self._states[self._slot(op)])
                self._land(op)

    def _land(self, op: CacheOp) -> None:
        self._landed.append(CacheAck(op.op_id))

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


def _pool(kv: KvPool, pages: int, tier: ArenaTier, pinned: bool) -> HostPool | None:
    return HostPool(kv, pages - 1, tier, pinned=pinned) if pages > 1 else None

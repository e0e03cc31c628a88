"""Blocks that are not in the KV pool: the host tier and the images of suspended requests.

It carries out a plan's cache operations and says when each is done. It does not know
why a block moves, nor what is findable where; that a plan's operations run in an order
is the handle's business, for which they are offered in parts here.

A host block lies in one piece, all layers' keys and values one behind the other, so
that a block is one copy here, one object for a tier further away, and a stretch of
neighbours is one copy too.
"""

import itertools
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from drumline.contract.arena import ArenaTier, HostArena, PageLayout
from drumline.contract.arrays import NO_INTS, IntArray
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
from drumline.device.copying import CopyThreads, Steps, Task
from drumline.device.kv import KvPool
from drumline.device.memory import host_memory

_EMPTY = 0
"""The stamp of a host block that nothing was ever stored in."""

STEP_BYTES = 192 << 10
"""Of one block, what a step of a load brings at least: less, and the calls cost more than
the copying. A layer of a large model is more than that."""
_SHARE_BYTES = 2 << 20
"""What a thread copies at least, for less than which it is not worth waking."""
FENCED_BYTES = 16 << 20
"""A load of less is done before its forward, by the forward's thread too: to wake others and
to wait for them step by step would take a good part of what the copying takes."""

Bytes = NDArray[np.uint8]
_Stretch = tuple[int, int, int]
"""Source, target and how many blocks, which are neighbours on both sides."""


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


class HostPool:
    """Blocks of one tier in host memory, numbered from 1.

    Each block carries the stamp of the layout it was stored in. A block of another
    layout, or one that was never stored, is not read.
    """

    __slots__ = ("_blocks", "_memory", "_stamps", "arena")

    def __init__(self, kv: KvPool, blocks: int, tier: ArenaTier) -> None:
        layout = kv.layout
        self._memory = host_memory(blocks * layout.block_bytes, kv.device)
        self.arena = HostArena(self._memory.data_ptr(), self._memory.numel(), layout, tier)
        self._blocks: Bytes = self._memory.numpy().reshape(blocks, layout.fields, -1)
        self._stamps = np.full(blocks + 1, _EMPTY, np.uint32)

    def stores(self, kv: KvPool, moves: Iterable[BlockMoves], threads: int) -> list[Task]:
        """Return the tasks that copy blocks of the KV pool into this one."""
        sources, targets = _joined(moves)
        self._check(targets)
        self._stamps[targets] = _stamp(kv.layout)
        return [
            partial(_copy, self._blocks, kv.bytes.numpy(), stretches)
            for stretches in self._shares(sources, targets - 1, threads)
        ]

    def loads(
        self, kv: KvPool, moves: Iterable[BlockMoves], threads: int, step_fields: int
    ) -> list[list[Task]]:
        """Return the tasks that copy blocks into the KV pool, `step_fields` parts of each a step.

        Raises InvariantError for a block that holds nothing of the KV pool's layout.
        """
        sources, targets = _joined(moves)
        self._check(sources)
        foreign = sources[self._stamps[sources] != _stamp(kv.layout)]
        if len(foreign):
            raise InvariantError(
                f"{self.arena.tier} block {int(foreign[0])} holds no page of layout "
                f"{kv.layout.tag!r}"
            )
        shares = self._shares(sources - 1, targets, threads)
        steps: list[list[Task]] = []
        for first in range(0, kv.layout.fields, step_fields):
            part = np.s_[:, first : first + step_fields]
            into, out_of = kv.bytes.numpy()[part], self._blocks[part]
            steps.append([partial(_copy, into, out_of, stretches) for stretches in shares])
        return steps

    def _shares(self, sources: IntArray, targets: IntArray, threads: int) -> list[list[_Stretch]]:
        """Return what each thread copies: as many shares as are worth a thread of their own."""
        size = len(sources) * self.arena.layout.block_bytes
        count = max(1, min(threads, len(sources), size // _SHARE_BYTES))
        # Whole shares one behind the other, so that neighbours stay together.
        cut = [len(sources) * n // count for n in range(count + 1)]
        return [
            list(_stretches(sources[start:end], targets[start:end]))
            for start, end in itertools.pairwise(cut)
        ]

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


def _joined(moves: Iterable[BlockMoves]) -> tuple[IntArray, IntArray]:
    """Return the sources and the targets of all moves."""
    every = list(moves)
    if len(every) == 1:
        return every[0].sources, every[0].targets
    return (
        np.concatenate([NO_INTS, *(move.sources for move in every)]),
        np.concatenate([NO_INTS, *(move.targets for move in every)]),
    )


def _stretches(sources: IntArray, targets: IntArray) -> Iterator[_Stretch]:
    """Yield stretches in which both count up by one."""
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


def _copy(into: Bytes, out_of: Bytes, stretches: list[_Stretch]) -> None:
    """Copy stretches of blocks, `[blocks, fields, field_bytes]` on both sides.

    numpy moves a part of a block by the system's own copy, which is quicker than loops of
    vectors for a few kilobytes, and lets go of the interpreter's lock meanwhile.
    """
    for source, target, count in stretches:
        if count == 1:
            # Scattered blocks are many, and this is half the work.
            into[target] = out_of[source]
        else:
            into[target : target + count] = out_of[source : source + count]


class Load:
    """What a plan loads for its own forward: which layers of it are there.

    It is handed to that forward and to no other, which is how a forward never waits for
    another plan's load.
    """

    __slots__ = ("_step_layers", "_steps")

    def __init__(self, steps: Steps, step_layers: int) -> None:
        self._steps = steps
        self._step_layers = step_layers

    def wait(self, layer: int) -> None:
        """Return once a layer's keys and values are in the pool."""
        self._steps.wait(layer // self._step_layers)

    def wait_all(self) -> None:
        """Return once all of it is in the pool."""
        self._steps.wait_all()


class HostCache:
    """The host tiers and the row states beside them.

    Thread: forward thread, but for `poll`.
    """

    __slots__ = ("_host", "_kv", "_landed", "_rows", "_snapshots", "_states", "_threads")

    def __init__(
        self, kv: KvPool, rows: RowStates, sizes: HostSizes, threads: int, clock: Clock
    ) -> None:
        self._kv = kv
        self._rows = rows
        self._host = _pool(kv, sizes.host_pages, ArenaTier.HOST)
        self._snapshots = _pool(kv, sizes.snapshot_pages, ArenaTier.SNAPSHOT)
        # By slot, from 1.
        slots = sizes.max_retracted + 1, rows.row_words
        self._states = torch.zeros(slots, dtype=torch.int64, device=kv.device)
        self._landed: deque[CacheAck] = deque()
        self._threads = CopyThreads(threads if self.arenas else 0, clock)

    @property
    def arenas(self) -> tuple[HostArena, ...]:
        """The host memory of every tier there is."""
        return tuple(pool.arena for pool in (self._host, self._snapshots) if pool is not None)

    def poll(self) -> list[CacheAck]:
        """Return the operations that are done and were not returned before. Thread: any."""
        self._threads.check()
        return [self._landed.popleft() for _ in range(len(self._landed))]

    def stop(self) -> None:
        """Finish what is being copied, then end the threads that do."""
        self._threads.stop()

    def store_ordered(self, ops: Sequence[CacheOp]) -> None:
        """Copy what a plan may give away in the same breath: before anything else of it."""
        for op in ops:
            if isinstance(op, WriteBack) and not op.pinned:
                self._store(self._of(self._host, op), op.moves)
                self._land(op)
            elif isinstance(op, Snapshot):
                if op.moves:
                    self._store(self._of(self._snapshots, op), op.moves)
                self._rows.export_row(op.row, self._states[self._slot(op)])
                self._land(op)

    def store_pinned(self, ops: Sequence[CacheOp]) -> None:
        """Begin to copy what stays as it is until the operation is acknowledged."""
        for op in ops:
            if isinstance(op, WriteBack) and op.pinned:
                tasks = self._of(self._host, op).stores(self._kv, op.moves, len(self._threads))
                self._threads.start([tasks], partial(self._land, op))

    def load(self, ops: Sequence[CacheOp]) -> Load | None:
        """Begin to copy blocks to the device: those that the plan's forward reads, then restores.

        Returns what the forward is to wait for, layer by layer, or None if there is nothing, or
        it was little and is there. Nobody reads a restored request's blocks before the
        acknowledgment; its state is in place at once.
        """
        loads = [op for op in ops if isinstance(op, LoadBack)]
        fence = self._begin_load(loads) if loads else None
        for op in ops:
            if isinstance(op, Restore):
                self._rows.import_row(op.row, self._states[self._slot(op)])
                self._begin_restore(op)
        return fence

    def _begin_load(self, ops: list[LoadBack]) -> Load | None:
        host = self._of(self._host, ops[0])
        layout = self._kv.layout
        moves = [move for op in ops for move in op.moves]
        if sum(len(move.sources) for move in moves) * layout.block_bytes < FENCED_BYTES:
            (tasks,) = host.loads(self._kv, moves, len(self._threads), layout.fields)
            self._threads.run(tasks)
            self._land(*ops)
            return None
        step_layers = max(1, STEP_BYTES // (2 * layout.field_bytes))
        steps = host.loads(self._kv, moves, len(self._threads), 2 * step_layers)
        return Load(self._threads.start(steps, partial(self._land, *ops)), step_layers)

    def _begin_restore(self, op: Restore) -> None:
        tasks: list[list[Task]] = []
        for pool, moves in ((self._host, op.from_host), (self._snapshots, op.from_snapshot)):
            if moves:
                tasks += self._of(pool, op).loads(
                    self._kv, moves, len(self._threads), self._kv.layout.fields
                )
        if tasks:
            self._threads.start(tasks, partial(self._land, op))
        else:
            self._land(op)

    def _store(self, pool: HostPool, moves: Iterable[BlockMoves]) -> None:
        # This thread is one of those that copy, as it waits for the others anyway.
        self._threads.run(pool.stores(self._kv, moves, len(self._threads)))

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

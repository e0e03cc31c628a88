"""Blocks of one host tier, and which of them are copied where.

A host block lies in one piece, all layers' keys and values one behind the other, so
that a block is one copy here, one object for a tier further away, and a stretch of
neighbours is one copy too. It does not know why a block moves.
"""

import itertools
import zlib
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from drumline.contract.arena import ArenaTier, HostArena, PageLayout
from drumline.contract.arrays import NO_INTS, IntArray
from drumline.contract.cache import BlockMoves
from drumline.core.errors import InvariantError
from drumline.device.copying import Task
from drumline.device.kv import KvPool
from drumline.device.memory import host_memory

_EMPTY = 0
"""The stamp of a host block that nothing was ever stored in."""
_SHARE_BYTES = 2 << 20
"""What a thread copies at least, for less than which it is not worth waking."""

Bytes = NDArray[np.uint8]
Stretch = tuple[int, int, int]
"""Source, target and how many blocks, which are neighbours on both sides."""


class HostPool:
    """Blocks of one tier in host memory, numbered from 1.

    Each block carries the stamp of the layout it was stored in. A block of another
    layout, or one that was never stored, is not read.
    """

    __slots__ = ("_stamps", "arena", "blocks")

    def __init__(self, kv: KvPool, blocks: int, tier: ArenaTier) -> None:
        layout = kv.layout
        memory = host_memory(blocks * layout.block_bytes, kv.device)
        self.arena = HostArena(memory.data_ptr(), memory.numel(), layout, tier)
        self.blocks = memory.view(blocks, layout.fields, -1)
        """All of them, uint8 `[blocks, fields, field_bytes]`; that of number 1 is the first."""
        self._stamps = np.full(blocks + 1, _EMPTY, np.uint32)

    def taking(self, kv: KvPool, moves: Iterable[BlockMoves]) -> tuple[IntArray, IntArray]:
        """Return the blocks of the KV pool that are to be kept here, and their places in `blocks`.

        They count as kept from now on.
        """
        sources, targets = _joined(moves)
        self._check(targets)
        self._stamps[targets] = _stamp(kv.layout)
        return sources, targets - 1

    def giving(self, kv: KvPool, moves: Iterable[BlockMoves]) -> tuple[IntArray, IntArray]:
        """Return the places in `blocks` of what is to go back, and the KV pool's blocks for it.

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
        return sources - 1, targets

    def stores(self, kv: KvPool, moves: Iterable[BlockMoves], threads: int) -> list[Task]:
        """Return the tasks that copy blocks of the KV pool into this one, both on the host."""
        into, out_of = self.blocks.numpy(), kv.bytes.numpy()
        return [
            partial(_copy, into, out_of, share)
            for share in self._shares(*self.taking(kv, moves), threads)
        ]

    def loads(
        self, kv: KvPool, moves: Iterable[BlockMoves], threads: int, step_fields: int
    ) -> list[list[Task]]:
        """Return the tasks that copy blocks into the KV pool, `step_fields` parts of each a step.

        Raises InvariantError for a block that holds nothing of the KV pool's layout.
        """
        shares = self._shares(*self.giving(kv, moves), threads)
        blocks, places = kv.bytes.numpy(), self.blocks.numpy()
        steps: list[list[Task]] = []
        for first in range(0, kv.layout.fields, step_fields):
            part = np.s_[:, first : first + step_fields]
            into, out_of = blocks[part], places[part]
            steps.append([partial(_copy, into, out_of, share) for share in shares])
        return steps

    def _shares(self, sources: IntArray, targets: IntArray, threads: int) -> list[list[Stretch]]:
        """Return what each thread copies: as many shares as are worth a thread of their own."""
        size = len(sources) * self.arena.layout.block_bytes
        count = max(1, min(threads, len(sources), size // _SHARE_BYTES))
        # Whole shares one behind the other, so that neighbours stay together.
        cut = [len(sources) * n // count for n in range(count + 1)]
        return [
            list(stretches(sources[start:end], targets[start:end]))
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


def stretches(sources: IntArray, targets: IntArray) -> Iterator[Stretch]:
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


def _copy(into: Bytes, out_of: Bytes, share: list[Stretch]) -> None:
    """Copy stretches of blocks, `[blocks, fields, field_bytes]` on both sides.

    numpy moves a part of a block by the system's own copy, which is quicker than loops of
    vectors for a few kilobytes, and lets go of the interpreter's lock meanwhile.
    """
    for source, target, count in share:
        if count == 1:
            # Scattered blocks are many, and this is half the work.
            into[target] = out_of[source]
        else:
            into[target : target + count] = out_of[source : source + count]

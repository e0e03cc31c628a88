"""Blocks of cache entries in three tiers, and copies between them that take their time.

The fake plane's memory. Ordered stores and loads happen where the plan's order has
them. Copies that a real plane may carry out any time until their acknowledgment, such
as stores of pinned blocks and restores, happen here at the last moment.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from drumline.contract.cache import (
    BlockMoves,
    CacheAck,
    CacheOp,
    LoadBack,
    Restore,
    Snapshot,
    WriteBack,
)
from drumline.contract.specs import DeviceSpecs
from drumline.core.errors import InvariantError
from drumline.replay.arithmetic import Entries

GARBAGE = 0xDEAD_BEEF_DEAD_BEEF
"""What a slot holds that nobody wrote."""


class PagedTiers:
    """Device, host and snapshot blocks, a group an array: `[blocks, tokens]`.

    `last` has the token that each request sampled last; a suspended request's lies in
    its blob slot and nowhere else.
    """

    def __init__(
        self,
        specs: DeviceSpecs,
        last: dict[str, int],
        delay: Callable[[CacheOp], int],
        failing: Callable[[CacheOp], bool],
    ) -> None:
        self.device = _blank(specs, specs.num_pages)
        self._host = _blank(specs, specs.num_host_pages)
        self._snapshots = _blank(specs, specs.num_snapshot_pages)
        self._blobs: dict[int, int] = {}
        self._slots = specs.max_retracted_requests
        self._last = last
        self._delay = delay
        self._failing = failing
        self._running: list[_Running] = []

    def store(self, ops: Sequence[CacheOp]) -> None:
        """Carry out the ordered stores, and begin those that order nothing."""
        for op in ops:
            match op:
                case WriteBack(pinned=True):
                    self._begin(op, partial(_copy, self.device, self._host, op.moves))
                case WriteBack():
                    self._at_once(op, partial(_copy, self.device, self._host, op.moves))
                case Snapshot():
                    self._at_once(op, partial(self._image, op))

    def load(self, ops: Sequence[CacheOp]) -> None:
        """Carry out what the plan's forward reads, and begin the restores."""
        for op in ops:
            match op:
                case LoadBack():
                    self._at_once(op, partial(_copy, self._host, self.device, op.moves))
                case Restore():
                    self._begin(op, partial(self._bring_back, op))

    def poll(self) -> list[CacheAck]:
        """Let a moment pass; return the operations that it ended."""
        landed = [running for running in self._running if running.polls <= 0]
        self._running = [running for running in self._running if running.polls > 0]
        for running in self._running:
            running.polls -= 1
        for running in landed:
            running.finish()
        return [CacheAck(running.op.op_id, running.ok) for running in landed]

    def _at_once(self, op: CacheOp, copy: Callable[[], None]) -> None:
        ok = not self._failing(op)
        if ok:
            copy()
        self._running.append(_Running(op, self._delay(op), ok, lambda: None))

    def _begin(self, op: CacheOp, copy: Callable[[], None]) -> None:
        ok = not self._failing(op)
        self._running.append(_Running(op, self._delay(op), ok, copy if ok else lambda: None))

    def _image(self, op: Snapshot) -> None:
        self._check_slot(op.slot)
        _copy(self.device, self._snapshots, op.moves)
        self._blobs[op.slot] = self._last.pop(op.rid)

    def _bring_back(self, op: Restore) -> None:
        self._check_slot(op.slot)
        _copy(self._host, self.device, op.from_host)
        _copy(self._snapshots, self.device, op.from_snapshot)
        self._last[op.rid] = self._blobs[op.slot]

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot <= self._slots:
            raise InvariantError(f"blob slot {slot} of {self._slots}")


class _Running:
    """An operation that is not acknowledged yet."""

    __slots__ = ("finish", "ok", "op", "polls")

    def __init__(self, op: CacheOp, polls: int, ok: bool, finish: Callable[[], None]) -> None:
        self.op = op
        self.polls = polls
        self.ok = ok
        self.finish = finish


def _blank(specs: DeviceSpecs, pages: int) -> list[Entries]:
    return [
        np.full((pages * group.blocks_per_parent, group.block_tokens), GARBAGE, np.uint64)
        for group in specs.groups
    ]


def _copy(sources: list[Entries], targets: list[Entries], moves: Iterable[BlockMoves]) -> None:
    for move in moves:
        if len(move.targets) and min(move.sources.min(), move.targets.min()) < 1:
            raise InvariantError("a cache operation names the null block")
        targets[move.group][move.targets] = sources[move.group][move.sources]

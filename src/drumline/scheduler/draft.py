"""A plan while it is being made: what the parts of the planning add to it."""

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import Struct

from drumline.contract.arrays import IntArray
from drumline.contract.cache import BlockMoves, CacheOp
from drumline.contract.plan import (
    AbortReason,
    Batch,
    Bound,
    PageZeroes,
    Plan,
    PlanAbort,
    RemoteDecode,
    RemotePrefill,
    TablePatch,
)
from drumline.contract.storage import StorageOp


class _Elsewhere(Struct):
    """What storage workers and peers are to do."""

    storage_ops: list[StorageOp]
    remote_prefills: list[RemotePrefill]
    remote_decodes: list[RemoteDecode]


class Draft:
    """Collects one plan. Arrays that are added belong to the plan from then on."""

    __slots__ = (
        "_aborts",
        "_bound",
        "_cache_ops",
        "_copies",
        "_elsewhere",
        "_patches",
        "_zeroes",
        "round",
    )

    def __init__(self, number: int) -> None:
        self.round = number
        self._bound: list[Bound] = []
        self._cache_ops: list[CacheOp] = []
        self._elsewhere: _Elsewhere | None = None
        self._aborts: list[PlanAbort] = []
        self._patches: dict[int, list[tuple[IntArray, ...]]] = {}
        self._zeroes: dict[int, list[tuple[IntArray, ...]]] = {}
        self._copies: dict[int, list[tuple[IntArray, ...]]] = {}

    def bind(self, row: int, generation: int, rid: str) -> None:
        self._bound.append(Bound(row, generation, rid))

    def patch(self, group: int, rows: IntArray, columns: IntArray, pages: IntArray) -> None:
        self._patches.setdefault(group, []).append((rows, columns, pages))

    def zero(self, group: int, pages: IntArray) -> None:
        self._zeroes.setdefault(group, []).append((pages,))

    def copy(self, group: int, sources: IntArray, targets: IntArray) -> None:
        self._copies.setdefault(group, []).append((sources, targets))

    def cache(self, op: CacheOp) -> None:
        self._cache_ops.append(op)

    def storage(self, op: StorageOp) -> None:
        self._others().storage_ops.append(op)

    def remote_prefill(self, row: RemotePrefill) -> None:
        self._others().remote_prefills.append(row)

    def remote_decode(self, row: RemoteDecode) -> None:
        self._others().remote_decodes.append(row)

    def _others(self) -> _Elsewhere:
        if self._elsewhere is None:
            self._elsewhere = _Elsewhere([], [], [])
        return self._elsewhere

    def abort(self, rid: str, reason: AbortReason, detail: str) -> None:
        self._aborts.append(PlanAbort(rid, reason, detail))

    def done(self, batch: Batch | None) -> Plan:
        """Return the plan."""
        patches: tuple[TablePatch, ...] = ()
        zeroes: tuple[PageZeroes, ...] = ()
        copies: tuple[BlockMoves, ...] = ()
        if self._patches:  # most rounds have none, and do not pay for looking
            patches = tuple(
                [TablePatch(group, *_joined(parts)) for group, parts in self._patches.items()]
            )
        if self._zeroes:
            zeroes = tuple(
                [PageZeroes(group, *_joined(parts)) for group, parts in self._zeroes.items()]
            )
        if self._copies:
            copies = tuple(
                [BlockMoves(group, *_joined(parts)) for group, parts in self._copies.items()]
            )
        plan = Plan(
            round=self.round,
            batch=batch,
            bound=tuple(self._bound),
            patches=patches,
            zeroes=zeroes,
            copies=copies,
            aborts=tuple(self._aborts),
            cache_ops=tuple(self._cache_ops),
        )
        if self._elsewhere is None:
            return plan
        return msgspec.structs.replace(
            plan,
            storage_ops=tuple(self._elsewhere.storage_ops),
            remote_prefills=tuple(self._elsewhere.remote_prefills),
            remote_decodes=tuple(self._elsewhere.remote_decodes),
        )


def _joined(parts: list[tuple[IntArray, ...]]) -> Sequence[IntArray]:
    """Return the columns of `parts`, each as one array that nobody writes to."""
    columns: Sequence[IntArray] = parts[0]
    if len(parts) > 1:
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    for column in columns:
        column.setflags(write=False)
    return columns

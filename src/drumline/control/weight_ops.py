"""Operations on weights, once the gate let them pass: on all ranks, or on none.

Whatever a rank finds out by itself goes into an agreement, and what all of them agreed on
takes effect everywhere before anybody is answered. It knows no call and no state of the engine.
"""

import logging
from collections.abc import Callable
from typing import assert_never

import msgspec
import numpy as np

from drumline.contract.ports import DataPlane, Group
from drumline.contract.weights import (
    DiskWeights,
    NewWeights,
    SentWeights,
    TensorWeights,
    WeightGroup,
    WeightRows,
)
from drumline.control.operations import Done, JoinGroup, LeaveGroup, TensorParts, WeightsAsked
from drumline.control.weight_calls import RowsAsked

_log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode_rows = msgspec.msgpack.Decoder(WeightRows | str | None).decode


class WeightOps:
    """The operations of one rank, in step with all others."""

    def __init__(
        self,
        data_plane: DataPlane,
        replica: Group,
        world: Group,
        agreed: Callable[[bool], bool],
        cleared: Callable[[], bool],
        *,
        rank: int,
        ranks: int,
        discards: bool,
    ) -> None:
        """Operate rank `rank` of `ranks`.

        `agreed` says whether every rank says yes, `cleared` forgets the prefixes on all or on
        none; both are collective. `discards` is the policy of giving weights up before.
        """
        self._data_plane = data_plane
        self._replica = replica
        self._world = world
        self._agreed = agreed
        self._cleared = cleared
        self._rank = rank
        self._ranks = ranks
        self._discards = discards

    def run(self, asked: WeightsAsked) -> Done:
        """Carry out what every rank holds at the head of its queue.

        Collective: every rank of the engine, in one round.
        """
        work = asked.work
        match work:
            case JoinGroup():
                done = self._join(work)
            case LeaveGroup():
                done = self._leave(work.name)
            case TensorParts():
                done = self._load(self._own(work), asked.flush, str(work))
            case DiskWeights() | SentWeights():
                done = self._load(work, asked.flush, str(work))
            case _:
                assert_never(work)
        _log.info("%s", done.message)
        return done

    def rows(self, asked: RowsAsked) -> Done:
        """Return a weight's first rows as JSON. Collective: every rank of the replica."""
        own = self._data_plane.read_weight(asked.name, asked.rows)
        parts: list[WeightRows] = []
        for told in map(_decode_rows, self._replica.all_gather(_encode(own))):
            if isinstance(told, str):
                return Done(False, told)
            if told is not None:
                parts.append(told)
        rows = _joined(parts, asked.rows)
        return Done(True, msgspec.json.encode(rows.tolist()).decode())

    def _why(self, mine: str | None) -> str:
        """Return what the first rank says that has anything to say, the same on every rank.

        Stages of a pipeline have different weights: the rank that answers may know nothing.
        Collective: over the replica, then the world, where an agreement failed.
        """
        said = (mine or "").encode()
        for group in (self._replica, self._world):
            said = next(filter(None, group.all_gather(said)), b"")
        told = said.decode()
        if mine not in {None, told}:
            _log.info("rank %d besides: %s", self._rank, mine)
        return told

    def _join(self, work: JoinGroup) -> Done:
        """Have all ranks be in a group, or none: none meets the trainer unless all can."""
        last = work.rank_offset + self._ranks
        if last > work.size:
            fault: str | None = (
                f"world_size {work.size} leaves no room for this engine's {self._ranks} ranks from "
                f"rank_offset {work.rank_offset} on"
            )
        else:
            fault = self._data_plane.open_weight_group(
                WeightGroup(
                    name=work.name,
                    address=work.address,
                    port=work.port,
                    rank=work.rank_offset + self._rank,
                    size=work.size,
                    backend=work.backend,
                )
            )
        # What another frontend asked of another replica may be another thing.
        if not self._agreed(fault is None):
            return Done(False, self._why(fault))
        fault = self._data_plane.join_weight_group()
        if not self._agreed(fault is None):
            if fault is None:
                self._data_plane.leave_weight_group(work.name)
            return Done(False, self._why(fault))
        return Done(True, f"joined group {work.name}, from rank {work.rank_offset} on")

    def _leave(self, name: str) -> Done:
        """Have all ranks be in a group no more, whether they were or not."""
        # It is what whoever tidies up asks for, who may not know how far a join came.
        self._data_plane.leave_weight_group(name)
        return Done(True, f"left group {name}")

    def _own(self, work: TensorParts) -> TensorWeights | str:
        """Return the tensors for this rank, or why there are none."""
        parts = work.parts
        if len(parts) == 1:
            return TensorWeights(parts[0])
        if len(parts) == self._ranks:
            return TensorWeights(parts[self._rank])
        return (
            f"there are {len(parts)} serialized_named_tensors; send one for all ranks, or one for "
            f"each of the {self._ranks}"
        )

    def _load(self, source: NewWeights | str, flush: bool, what: str) -> Done:
        """Load weights on all ranks, or on none; nothing is flushed unless all can."""
        plane = self._data_plane
        fault = source if isinstance(source, str) else plane.open_weights(source)
        if not self._agreed(fault is None):
            plane.settle_weights(False)
            return Done(False, self._why(fault))
        # One rank that is to forget its prefixes has all do it: they were asked one by one.
        if not self._agreed(not flush) and not self._cleared():
            plane.settle_weights(False)
            return Done(False, "the cache is in use; retry once the running requests ended")
        fault = plane.load_weights()
        taken = self._agreed(fault is None)
        plane.settle_weights(taken)
        if taken:
            absent = plane.absent_weight()
            done = f"weights loaded from {what}"
            if self._agreed(absent is None):
                return Done(True, done, whole=True)
            return Done(True, f"{done}; {self._why(absent)} is one that is still to come")
        fault = self._why(fault)
        if not self._discards:
            return Done(False, fault)
        lost = (
            f"the weights were discarded, and others could not be loaded: {fault}; the engine "
            "must be started again"
        )
        return Done(False, lost, lost)


def _joined(parts: list[WeightRows], count: int) -> np.ndarray:
    """Return the first rows of a weight, put together."""
    first = parts[0]
    shape = min(count, first.shape[0]), *first.shape[1:]
    whole = np.empty(shape, np.float32)
    for part in parts:
        values = np.frombuffer(part.data, np.float32)
        match part.dim:
            case None:
                whole[:] = values.reshape(shape)
            case 0:
                whole[part.start : part.stop] = values.reshape(-1, *shape[1:])
            case _:
                whole[:, part.start : part.stop] = values.reshape(shape[0], -1)
    return whole

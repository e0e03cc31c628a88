"""What all ranks do together or not at all: what the gate lets pass, and releases of memory.

Each operation's work is its own module's; here is in which agreements it stands.
"""

import logging
from typing import assert_never

import msgspec

from drumline.contract.ports import DataPlane, Group, Reduce
from drumline.contract.regions import Region
from drumline.contract.specs import DeviceSpecs
from drumline.control.controls import Controls
from drumline.control.gate import Held, Passed, passed
from drumline.control.operations import (
    Done,
    Gated,
    ProfileStart,
    ProfileStop,
    StateSet,
    WeightsAsked,
)
from drumline.control.profiles import Profiles
from drumline.control.standing import Effect
from drumline.control.weight_ops import WeightOps
from drumline.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)


class Agreements:
    """One rank's part in what the ranks of the engine agree on, beside its forwards.

    Collective: every method that is called in every round, on every rank.
    """

    def __init__(
        self,
        *,
        replica: Group,
        world: Group,
        rank: int,
        controls: Controls,
        profiles: Profiles,
        scheduler: Scheduler,
        data_plane: DataPlane,
        specs: DeviceSpecs,
    ) -> None:
        self._replica = replica
        self._world = world
        self._controls = controls
        self._profiles = profiles
        self._scheduler = scheduler
        self._data_plane = data_plane
        self._weight_ops = WeightOps(
            data_plane,
            replica,
            world,
            self._converge,
            self._cleared,
            rank=rank,
            ranks=replica.size * world.size,
            discards=specs.discards_weights,
        )

    def gate(self, now_us: int) -> tuple[Passed, tuple[Effect, ...]]:
        """Run the control operations that every rank runs in the same round, or none does.

        Returns what passed, and what an operation wants done at once.

        Collective: every round, on every rank, so that a rank that was asked first never
        waits inside an operation for one that was not.
        """
        effects: tuple[Effect, ...] = ()
        gate = passed(self._world, self._held())
        if gate.flush:
            self._controls.flushed(self._cleared())
        if gate.operation is not None and (asked := self._controls.gated) is not None:
            effects = self._controls.ran(self._run_gated(asked, now_us))
        for wanted in self._controls.take_rows():
            self._controls.told(wanted, self._weight_ops.rows(wanted))
        return gate, effects

    def finish_drain(self, gate: Passed, drained: bool, copying: bool) -> None:
        """Tell a pause that waits for it that nothing runs any more; release memory.

        `drained` is whether nothing is scheduled or in flight, `copying` whether pages are copied.
        """
        if drained and self._controls.draining:
            self._controls.drained()
        if gate.release:
            self._release(drained and not copying)

    def _run_gated(self, asked: Gated, now_us: int) -> Done:
        """Run what all ranks let pass. Collective: on every rank."""
        match asked:
            case WeightsAsked():
                return self._weight_ops.run(asked)
            case ProfileStart():
                fault = self._profiles.open(asked.asked, now_us)
                agreed = self._converge(fault is None)
                begun = self._profiles.settle(agreed)
                why = fault or "another rank cannot record this; its log says why"
                return Done(agreed, begun or why)
            case ProfileStop():
                fault, recorded = self._profiles.stop()
                if not self._converge(fault is None):
                    return Done(False, fault or "another rank wrote no file; its log says why")
                return Done(True, recorded)
            case StateSet():
                fault = self._scheduler.adjust(asked.changes)
                settings = msgspec.json.encode(self._scheduler.adjustable).decode()
                return Done(fault is None, fault or settings)
        assert_never(asked)

    def _cleared(self) -> bool:
        """Forget the prefixes on every rank, or on none. Collective: on every rank."""
        cleared = self._converge(self._scheduler.can_clear())
        if cleared:
            self._scheduler.clear()
        return cleared

    def _held(self) -> Held:
        """Return what this rank brings to the gate."""
        asked = self._controls.gated
        return Held(
            flush=self._controls.flush_wanted,
            operation=None if asked is None else asked.kind,
            release=bool(self._controls.releasing),
            lacking=self._controls.lacking,
        )

    def _converge(self, mine: bool) -> bool:
        """Whether every rank says yes. Collective: over the replica, then the world."""
        (agreed,) = self._replica.all_reduce([int(mine)], Reduce.MIN)
        (agreed,) = self._world.all_reduce([agreed], Reduce.MIN)
        return bool(agreed)

    def _release(self, drained: bool) -> None:
        """Give memory back on every rank, once none can need it any more.

        Collective: on every rank of the engine, in the rounds in which the gate says that some
        replica waits for it. A replica that is not asked yet could still admit a request, so
        it holds the others up.
        """
        regions = self._controls.releasing
        clears = Region.KV_CACHE in regions
        ready = bool(regions) and drained and self._controls.gated is None
        if not self._converge(ready and not (clears and not self._scheduler.can_clear_l1())):
            return
        if clears:
            self._scheduler.clear_l1()
        # What cannot be taken back is let go once every rank has let go of the rest.
        drops = self._controls.drops
        kept = tuple(each for each in regions if not (drops and each is Region.WEIGHTS))
        fault = self._data_plane.release_memory(kept)
        if not self._converge(fault is None):
            if fault is None:
                self._data_plane.restore_memory(kept)
                fault = "another rank could not"
            self._controls.released(fault)
            return
        if drops:
            self._data_plane.drop_weights()
        self._controls.released(None)
        _log.info("released %s", ", ".join(regions))

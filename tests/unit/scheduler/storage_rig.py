"""A storage tier beside a scheduler's rig: objects with contents, and workers that are late.

A worker may touch the host blocks of an operation at any time until it is answered as
retired: what it reads it writes with the answer, and a worker that is not known to have
retired spoils its blocks again with every plan. A block that is given to somebody else too
soon then shows as the wrong contents in a forward.
"""

from scheduler_rig import GARBAGE, Rig, config

from drumline.contract.plan import Plan
from drumline.contract.storage import (
    StorageCancel,
    StorageDone,
    StorageGet,
    StorageKey,
    StorageOp,
    StoragePressure,
    StoragePut,
    StorageQuery,
)
from drumline.scheduler.config import SchedulerConfig, StorageLimits
from drumline.scheduler.events import StorageDetached, Tick
from drumline.scheduler.lifecycle import State

CALM = StoragePressure()
LIMITS = {
    "max_operations": 8,
    "max_keys_per_operation": 64,
    "max_host_blocks": 32,
    "max_known_objects": 200,
    "min_prefetch_tokens": 1,
    "max_prefetch_tokens": 1000,
    "wait_timeout_us": 1000,
    "ready_timeout_us": 500,
    "pressure_high": StoragePressure(10, 10, 10),
    "pressure_low": StoragePressure(2, 2, 2),
}


def limits(**changes) -> StorageLimits:
    return StorageLimits(**(LIMITS | changes))


class StorageRig:
    """A rig, the objects in its storage, and the operations that its workers have."""

    def __init__(
        self,
        storage: StorageLimits | None = None,
        cfg: SchedulerConfig | None = None,
        **changes,
    ) -> None:
        fields = {"num_host_pages": 64, "storage": storage or limits()}
        self.rig = Rig(cfg or config(**(fields | changes)))
        self.objects: dict[StorageKey, list] = {}
        self.open: dict[int, StorageOp] = {}
        self.cancelled: list[int] = []
        self.unretired: dict[int, StorageOp] = {}
        self.now_us = 0

    @property
    def scheduler(self):
        return self.rig.scheduler

    def tick(self, after_us: int = 0, *, forward=True, storage=True, pressure=CALM) -> None:
        self.now_us += after_us
        tick = Tick(
            now_us=self.now_us, allow_forward=forward, allow_storage=storage, pressure=pressure
        )
        self.scheduler.advance_head([tick])
        self.scheduler.check()

    def plan(self) -> Plan:
        for op in self.unretired.values():
            self._spoil(op)
        plan = self.rig.plan()
        for op in plan.storage_ops:
            if isinstance(op, StorageCancel):
                assert op.op_id in self.open, "an operation is cancelled that is over"
                self.cancelled.append(op.op_id)
            else:
                assert op.op_id not in self.open
                assert len(set(op.keys)) == len(op.keys)
                self.open[op.op_id] = op
        return plan

    def round(self) -> Plan:
        plan = self.plan()
        while self.rig.in_flight:
            self.rig.commit()
        return plan

    def run(self, rid: str, tokens, **changes) -> None:
        """Have a prompt computed, and its pages in host memory and in storage."""
        assert self.rig.submit(rid, tokens, **changes) is None
        for _ in range(8):
            self.round()
            self.catch_up()
            request = self.scheduler._requests.get(rid)
            if request is not None and request.state is State.DECODING:
                self.rig.finish(rid)

    def catch_up(self) -> None:
        """End whatever is under way."""
        while self.rig.unacknowledged:
            self.rig.acknowledge()
        while self.open:
            self.answer()

    def forget_locally(self) -> None:
        """Have no page cached but in storage."""
        assert self.scheduler.clear(), "something is held"

    def answer(self, op_id: int | None = None, success=None, *, retired=True, failed=()) -> None:
        """Answer an operation, the oldest unless told; truly, unless told otherwise."""
        if op_id is None:
            op_id = next(iter(self.open))
        op = self.open.pop(op_id)
        if success is None:
            success = [isinstance(op, StoragePut) or key in self.objects for key in op.keys]
        if not retired:
            self.unretired[op_id] = op
        elif not isinstance(op, StorageQuery):
            self._carry_out(op, success)
        self._send(StorageDone(op_id=op_id, success=tuple(success), retired=retired, failed=failed))

    def retire(self, op_id: int) -> None:
        """Prove at last that a worker is done."""
        op = self.unretired.pop(op_id)
        self._send(StorageDone(op_id=op_id, success=(True,) * len(op.keys)))

    def _send(self, done: StorageDone) -> None:
        self.scheduler.advance_head([done])
        self.scheduler.check()

    def detach(self, rid: str) -> None:
        self.scheduler.advance_head([StorageDetached(rid)])
        self.scheduler.check()

    def _carry_out(self, op: StorageGet | StoragePut, success) -> None:
        for key, block, good in zip(op.keys, op.blocks, success, strict=True):
            memory, slots = self.rig.host[key.group], self._slots(key)
            if isinstance(op, StorageGet):
                contents = self.objects[key] if good else [GARBAGE] * slots
                memory.update({(block, slot): contents[slot] for slot in range(slots)})
            elif good:
                contents = [memory[block, slot] for slot in range(slots)]
                assert GARBAGE not in contents, "garbage is stored"
                assert self.objects.setdefault(key, contents) == contents, "another page is stored"

    def _spoil(self, op: StorageOp) -> None:
        if isinstance(op, StorageGet):
            for key, block in zip(op.keys, op.blocks, strict=True):
                for slot in range(self._slots(key)):
                    self.rig.host[key.group][block, slot] = GARBAGE

    def _slots(self, key: StorageKey) -> int:
        return self.rig._size(key.group)

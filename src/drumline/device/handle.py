"""The device's operations: all that may be done to it once it serves.

The handle is held by the data plane alone, and called on the forward thread alone.
It knows the order in which a plan is carried out; what the parts do is the
executor's and the pool's business.
"""

from collections.abc import Sequence

import torch

from drumline.contract.plan import Plan
from drumline.contract.ports import Dispatch
from drumline.contract.request import Admission
from drumline.contract.result import ForwardResult
from drumline.device.executor import Executor
from drumline.device.kv import BlockTable, KvPool
from drumline.device.sampling.sampler import Sampler


class DeviceHandle:
    """A loaded model with its memory.

    Thread: forward thread.
    """

    __slots__ = ("_executor", "_pool", "_sampler", "_table")

    def __init__(
        self, executor: Executor, pool: KvPool, table: BlockTable, sampler: Sampler
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._table = table
        self._sampler = sampler

    def admit(self, requests: Sequence[Admission]) -> None:
        """Learn requests before a plan binds rows to them."""
        self._sampler.admit(requests)

    def release(self, rids: Sequence[str]) -> None:
        """Forget ended requests."""
        self._sampler.release(rids)

    @torch.inference_mode()
    def execute(self, plan: Plan, dispatch: Dispatch) -> ForwardResult | None:
        """Carry out a plan; returns its forward's result, or None without a batch.

        The order is a contract: a plan may give away a block in the same breath.
        """
        # Copies first: a source may be somebody else's from this plan on, and be zeroed below.
        for copies in plan.copies:
            self._pool.copy(copies.sources, copies.targets)
        # Then the new owners' blocks are blanked, before anything of theirs is written.
        for zeroes in plan.zeroes:
            self._pool.zero(zeroes.blocks)
        # Only now may the table change: all forwards queued before this plan have run.
        for patch in plan.patches:
            self._table.patch(patch.rows, patch.columns, patch.blocks)
        for bound in plan.bound:
            self._sampler.bind(bound.row, bound.rid)
        if plan.batch is None or not plan.batch.size:
            return None
        return self._executor.run(plan.batch, self._table, dispatch.logprobs)

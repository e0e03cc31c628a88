"""The device's operations: all that may be done to it once it serves.

The handle is held by the data plane alone, and called on the forward thread alone.
It knows the order in which a plan is carried out; what the parts do is the
executor's and the pool's business.
"""

import tempfile
from collections.abc import Sequence

import torch

from drumline.contract.cache import CacheAck, CacheOp
from drumline.contract.grammar import Attachment
from drumline.contract.plan import Plan
from drumline.contract.ports import Dispatch, DpRound
from drumline.contract.profile import Recording, Span, Stage
from drumline.contract.regions import Region
from drumline.contract.request import Admission
from drumline.contract.result import ForwardResult
from drumline.device.executor import Executor
from drumline.device.host_cache import HostCache
from drumline.device.kv import BlockTable, KvPool
from drumline.device.landing import Landing
from drumline.device.memory import settle, trim
from drumline.device.profiler import Profiler
from drumline.device.sampling.sampler import Sampler
from drumline.device.serving_weights import ServingWeights


class DeviceHandle:
    """A loaded model with its memory.

    Thread: forward thread, where a method does not say otherwise.
    """

    __slots__ = (
        "_cache",
        "_executor",
        "_pool",
        "_profiler",
        "_sampler",
        "_table",
        "weights",
    )

    def __init__(
        self,
        executor: Executor,
        pool: KvPool,
        table: BlockTable,
        sampler: Sampler,
        cache: HostCache,
        weights: ServingWeights,
        profiler: Profiler,
    ) -> None:
        self._cache = cache
        self._executor = executor
        self._pool = pool
        self._profiler = profiler
        self._table = table
        self._sampler = sampler
        self.weights = weights
        """What an update of weights is asked of."""

    def admit(self, requests: Sequence[Admission]) -> None:
        """Learn requests before a plan binds rows to them."""
        self._sampler.admit(requests)

    def attach_grammars(self, attachments: Sequence[Attachment]) -> None:
        """Hold admitted requests to grammars."""
        self._sampler.attach(attachments)

    def release(self, rids: Sequence[str]) -> None:
        """Forget ended requests."""
        self._sampler.release(rids)

    def poll_cache_acks(self) -> list[CacheAck]:
        """Return the cache operations that landed since the last call. Thread: any."""
        return self._cache.poll()

    @torch.inference_mode()
    def store_pinned(self, ops: Sequence[CacheOp]) -> None:
        """Begin a plan's stores of pinned blocks, for which nobody waits."""
        self._cache.store_pinned(ops)

    def stop(self) -> None:
        """Finish the copies under way. Thread: any, once the forward thread has stopped."""
        self._cache.stop()

    @torch.inference_mode()
    def execute(
        self, plan: Plan, dispatch: Dispatch
    ) -> ForwardResult | Landing[ForwardResult] | None:
        """Carry out a plan, but for its pinned stores; returns its forward's result, or None.

        The order is a contract: a plan may give away a block in the same breath.
        """
        # Stores of what is given away come before all else: the very next line may overwrite it,
        # and a suspended request's row is somebody else's in this plan's forward.
        if plan.cache_ops:
            self._cache.store_ordered(plan.cache_ops)
        # Copies before blanks: a source may be somebody else's from this plan on, zeroed below.
        for copies in plan.copies:
            self._pool.copy(copies.sources, copies.targets)
        # Then the new owners' blocks are blanked, before anything of theirs is written.
        for zeroes in plan.zeroes:
            self._pool.zero(zeroes.blocks)
        # Loads land on blanked pages, so they begin only now. A restored row's state is in place
        # before its new row is bound, and before a forward may name it.
        fence = self._cache.load(plan.cache_ops) if plan.cache_ops else None
        # Only now may the table change: all forwards queued before this plan have run.
        for patch in plan.patches:
            self._table.patch(patch.rows, patch.columns, patch.blocks)
        for bound in plan.bound:
            self._sampler.bind(bound.row, bound.rid)
        if plan.batch is None or not plan.batch.size:
            if fence is not None:
                # The next plan's forward reads these pages too, and has no fence of theirs.
                fence.wait_all()
            if dispatch.dp is not None and dispatch.dp.idle:
                self.idle_forward(dispatch.dp)
            return None
        with self._profiler.forward(plan):
            return self._executor.run(
                plan.batch, self._table, dispatch.logprobs, dispatch.history, fence
            )

    @torch.inference_mode()
    def idle_forward(self, dp: DpRound) -> None:
        """Take part in what the other replicas forward, without a batch of one's own."""
        self._executor.idle(dp)

    def release_memory(self, regions: Sequence[Region]) -> str | None:
        """Give regions of memory back; returns why it cannot, and then all are there."""
        store = self.weights.store
        why = store.why_kept or self._pool.why_kept
        if why is not None:
            return why
        # Copies may still read or write it on streams of their own.
        settle(self._pool.device)
        if Region.WEIGHTS in regions:
            try:
                # The one step that may fail, so it comes before all others.
                store.offload()
            except OSError as error:
                return f"no room to keep the weights in {tempfile.gettempdir()}: {error.strerror}"
        if Region.KV_CACHE in regions:
            self._pool.give_back()
        # What is recorded names places in it, and has memory of its own.
        self._executor.forget()
        trim(self._pool.device)
        return None

    def restore_memory(self, regions: Sequence[Region]) -> None:
        """Take regions back: the KV cache blank, weights as they were, or blank if dropped."""
        if Region.WEIGHTS in regions:
            self.weights.store.restore()
        if Region.KV_CACHE in regions:
            self._pool.take_back()
        if not self.weights.store.away:
            self._executor.record()

    def open_profile(self, recording: Recording) -> str | None:
        """Make sure that this can be recorded and written; returns why it cannot."""
        return self._profiler.open(recording)

    def start_profile(self, stage: Stage | None) -> None:
        """Record what this thread does from now on."""
        self._profiler.start(stage)

    def stop_profile(self, spans: tuple[Span, ...]) -> str | None:
        """Record no more, and write the file; returns why it could not be written."""
        return self._profiler.stop(spans)

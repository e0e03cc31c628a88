"""The published C++ scheduler, dressed so that it can be driven beside ours."""

import tokenspeed_scheduler as cpp

from drumline.contract.specs import AttentionKind
from drumline.contract.storage import StoragePressure
from drumline.core.config import Role
from drumline.scheduler.config import SchedulerConfig, StorageLimits

KINDS = {
    AttentionKind.FULL: cpp.AttnKind.Full,
    AttentionKind.SLIDING_WINDOW: cpp.AttnKind.SlidingWindow,
    AttentionKind.STATE: cpp.AttnKind.State,
}
ROLES = dict(zip((Role.PREFILL, Role.DECODE, Role.PLAIN), cpp.SchedulerConfig.Role, strict=True))


class Published:
    """One C++ scheduler with the configuration of one of ours."""

    def __init__(self, config: SchedulerConfig) -> None:
        theirs = cpp.SchedulerConfig()
        theirs.prefix_granularity = config.prefix_granularity
        theirs.num_device_pages = config.num_pages
        theirs.num_snapshot_pages = 1
        theirs.max_scheduled_tokens = config.max_scheduled_tokens
        theirs.max_batch_size = config.max_rows
        theirs.decode_input_tokens = config.decode_tokens
        theirs.overlap_schedule_depth = config.overlap_depth
        theirs.enable_mixed_prefill_decode = config.mixed_batch
        theirs.disable_prefix_cache = not config.prefix_caching
        theirs.enable_kv_cache_events = config.kv_events
        theirs.num_host_pages = config.num_host_pages
        theirs.role = ROLES[config.role]
        if config.storage is not None:
            theirs.enable_l3_storage = True
            theirs.storage_config = _storage(config.storage)
        groups = []
        for group in config.groups:
            one = cpp.CacheGroupConfig(
                group.group_id,
                group.block_tokens,
                (config.num_pages - 1) * group.blocks_per_parent,
                KINDS[group.kind],
            )
            one.cache_blocks_per_lcm_block = group.blocks_per_parent
            if config.role is not Role.PLAIN:
                one.transfer_policy = cpp.CacheTransferPolicy.FullSuffix
            if group.window_tokens is not None:
                one.sliding_window_tokens = group.window_tokens
            groups.append(one)
        theirs.cache_groups = groups
        self.scheduler = cpp.Scheduler(theirs)

    def submit(self, rid: str, tokens: list[int], max_new_tokens: int) -> bool:
        """Submit; returns whether it was taken."""
        spec = cpp.RequestSpec()
        spec.request_id, spec.tokens, spec.max_new_tokens = rid, tokens, max_new_tokens
        try:
            self.scheduler.submit_requests([spec])
        except ValueError:
            return False
        return True

    def plan(self):
        return self.scheduler.next_execution_plan()

    def commit(self, rids: list[str], tokens: list[list[int]]) -> None:
        self._advance([self._result(*pair) for pair in zip(rids, tokens, strict=True)])

    def finish(self, rid: str) -> None:
        event = cpp.ForwardEvent.Finish()
        event.request_id = rid
        self._advance([event])

    def abort(self, rid: str) -> None:
        event = cpp.ForwardEvent.Abort()
        event.request_id = rid
        self._advance([event])

    def told(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """What was stored since the last call, as (hash, parent or 0, tokens), and removed."""
        return [
            (event.block_hashes[0], event.parent_block_hash or 0, tuple(event.token_ids))
            if event.kind == "BlockStored"
            else (event.block_hashes[0], -1, ())
            for event in self.scheduler.drain_kv_events()
        ]

    # -- storage and peers ------------------------------------------------------------

    def tick(self, now_us: int, forward: bool, storage: bool, pressure: StoragePressure) -> None:
        self._advance([cpp.Cache.StorageTick(now_us, forward, storage, _pressure(pressure))])

    def answer(self, op_id: int, success: list[bool], failed: list[bool]) -> None:
        self._advance([cpp.Cache.StorageDone(op_id, success, True, failed)])

    def detach(self, rid: str) -> None:
        self._advance([cpp.Cache.StorageDetach(rid)])

    def acknowledge(self, plan) -> None:
        """End every copy that a plan asks for."""
        for op in plan.cache:
            kind = {
                cpp.Cache.WriteBackOp: cpp.Cache.WriteBackDoneEvent,
                cpp.Cache.LoadBackOp: cpp.Cache.LoadBackDoneEvent,
            }.get(type(op))
            for op_id in op.op_ids if kind else ():
                event = kind()
                event.op_id = op_id
                self._advance([event])

    def bootstrapped(self, rid: str) -> None:
        self._advance([cpp.PD.BootstrappedEvent(rid)])

    def failed(self, rid: str) -> None:
        self._advance([cpp.PD.FailedEvent(rid)])

    def succeeded(self, rid: str) -> None:
        self._advance([cpp.PD.SucceededEvent(rid)])

    def remote_prefilled(self, rid: str, token: int) -> None:
        self._advance([cpp.PD.RemotePrefillDoneEvent(rid, token)])

    def _result(self, rid: str, tokens: list[int]):
        event = cpp.ForwardEvent.ExtendResult()
        event.request_id, event.tokens = rid, tokens
        return event

    def _advance(self, events) -> None:
        execution = cpp.ExecutionEvent()
        for event in events:
            execution.add_event(event)
        self.scheduler.advance(execution)


def storage_ops(plan) -> list[tuple[str, int, list[tuple[int, str, int]]]]:
    """The storage operations of a plan: kind, id and keys."""
    kinds = {
        cpp.Cache.StorageQueryOp: "query",
        cpp.Cache.StorageGetOp: "get",
        cpp.Cache.StoragePutOp: "put",
        cpp.Cache.StorageCancelOp: "cancel",
    }
    return [
        (kinds[type(op)], op.op_id, list(getattr(op, "keys", ())))
        for op in plan.cache
        if type(op) in kinds
    ]


def _pressure(pressure: StoragePressure):
    return cpp.StoragePressure(
        pressure.queued_operations, pressure.queued_bytes, pressure.oldest_operation_us
    )


def _storage(limits: StorageLimits):
    return cpp.StorageConfig(
        limits.max_operations,
        limits.max_keys_per_operation,
        limits.max_host_blocks,
        limits.max_known_objects,
        limits.max_prefetch_tokens,
        limits.min_prefetch_tokens,
        limits.wait_timeout_us,
        limits.ready_timeout_us,
        _pressure(limits.pressure_high),
        _pressure(limits.pressure_low),
    )

"""What the scheduler is told once: geometry, limits and policy.

It knows neither flags nor devices; `SchedulerConfig.of` takes what was resolved
from them.
"""

from typing import Self

from msgspec import UNSET, Struct
from msgspec.structs import replace

from drumline.contract.internal_state import Adjustments
from drumline.contract.specs import AttentionKind, CacheGroup, DeviceSpecs
from drumline.contract.storage import StoragePressure
from drumline.core.config import Config, Role, SchedulingPolicy, WritePolicy
from drumline.core.errors import ConfigError

PREPAID_TOKENS = 4096
"""A declared budget is reserved at admission up to this many tokens."""


class StorageLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the storage tier may be asked for. Raises ConfigError when it does not fit."""

    max_operations: int
    """Operations under way; half of them may store something."""
    max_keys_per_operation: int
    max_host_blocks: int
    """Host blocks that operations and fetched prompts hold; stores may hold half of them."""
    max_known_objects: int
    """Objects whose fate is remembered, and pages that may wait to be stored."""
    min_prefetch_tokens: int
    """Tokens of a prompt's missing pages that make asking worth while."""
    max_prefetch_tokens: int
    wait_timeout_us: int
    """How long a request waits for storage."""
    ready_timeout_us: int
    """How long what was fetched is held for a request that is not admitted."""
    pressure_high: StoragePressure
    """Where any of these is reached, storage is asked for nothing new …"""
    pressure_low: StoragePressure
    """… until all are at these."""

    def __post_init__(self) -> None:
        for name in (
            "max_operations",
            "max_keys_per_operation",
            "max_host_blocks",
            "max_known_objects",
            "min_prefetch_tokens",
            "wait_timeout_us",
            "ready_timeout_us",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"storage.{name}", f"{getattr(self, name)} is below 1")
        if self.max_prefetch_tokens < self.min_prefetch_tokens:
            raise ConfigError(
                "storage.max_prefetch_tokens",
                f"{self.max_prefetch_tokens} is below min_prefetch_tokens "
                f"{self.min_prefetch_tokens}",
            )
        for name in ("queued_operations", "queued_bytes", "oldest_operation_us"):
            low, high = getattr(self.pressure_low, name), getattr(self.pressure_high, name)
            if not 0 <= low < high:
                raise ConfigError(
                    f"storage.pressure_low.{name}",
                    f"{low} is not between 0 and the high mark of {high}",
                )


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Geometry, limits and policy of one scheduler. Raises ConfigError when they do not fit."""

    groups: tuple[CacheGroup, ...]
    num_pages: int
    """Parents in the device pool, the null page 0 included."""
    prefix_granularity: int
    """Tokens of a hashed prefix page."""
    max_rows: int
    """Requests that hold a pool row at the same time."""
    max_scheduled_tokens: int
    """Tokens one forward may feed."""
    role: Role = Role.PLAIN
    """Which part of a request's way the engine takes."""
    decode_tokens: int = 1
    """Tokens a decode row feeds; above 1 all but the first are drafts."""
    overlap_depth: int = 0
    """Forwards of one row that may be planned before the one ahead of them is committed: 0 or 1."""
    stages: int = 1
    """Pipeline stages. Where there are several, the first has not what the last samples: a row
    decodes again only once its result has come, and rows take turns, so that all stages compute."""
    mixed_batch: bool = True
    mixed_prefill_tokens: int | None = None
    """Prompt tokens that a batch with decodes may feed beside them; None is what is left."""
    prefix_caching: bool = True
    kv_events: bool = False
    """Whether `drain_kv_events` tells what became findable and what ceased to be."""
    prefix_replay_tokens: int = 0
    """Last tokens of a prompt that are computed whatever is cached; one always is."""
    promote_windows: bool = True
    """Whether a prefix that windows alone lack is cached for them when it is computed again."""
    share_in_flight: bool = True
    """A request waits for the prefix that another one is computing now."""
    priorities: bool = False
    """Whether requests of higher priority are admitted first; else in order of submission."""
    patience: int | None = None
    """Plans that may admit later requests before a waiting one; None is any number."""
    max_queued_requests: int | None = None
    """Requests that may wait beyond those that free rows can take; None is any number."""
    max_queued_tokens: int | None = None
    """Prompt tokens that may wait, where any do; None is any number."""
    num_host_pages: int = 1
    """Parents in the host tier, the null page included; 1 is no tier."""
    host_write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    storage: StorageLimits | None = None
    """What the storage tier behind the host tier may be asked for; None is no such tier."""
    num_snapshot_pages: int = 1
    """Parents in the pool of suspended requests' images, the null page included; 1 is no pool."""
    max_retracted_requests: int = 0
    """Requests that may be suspended at the same time."""
    debug_force_retraction_interval: int = 0
    """Suspend a request every so many plans; 0 is never."""
    max_model_tokens: int | None = None
    """Longest prompt plus answer the model takes."""

    @property
    def paged_groups(self) -> tuple[CacheGroup, ...]:
        """The groups whose blocks hold tokens; state groups come behind them."""
        return tuple(group for group in self.groups if group.kind is not AttentionKind.STATE)

    @property
    def state_groups(self) -> tuple[CacheGroup, ...]:
        return self.groups[len(self.paged_groups) :]

    @property
    def unsure_tokens(self) -> int:
        """Tokens by which a row may be shorter than planned: drafts in flight may be rejected."""
        return (self.decode_tokens - 1) * self.overlap_depth

    @classmethod
    def of(cls, specs: DeviceSpecs, config: Config) -> Self:
        """Return the configuration for a device and an operator's choices."""
        stages = config.parallel.pipeline_parallel_size
        return cls(
            groups=specs.groups,
            num_pages=specs.num_pages,
            prefix_granularity=specs.prefix_granularity,
            max_rows=specs.max_rows,
            max_scheduled_tokens=specs.max_scheduled_tokens,
            overlap_depth=config.in_flight_depth if stages == 1 else 0,
            stages=stages,
            mixed_batch=config.schedule.mixed_batch,
            mixed_prefill_tokens=config.schedule.mixed_prefill_tokens,
            prefix_caching=config.cache.prefix_caching,
            promote_windows=config.cache.promote_window_prefixes,
            share_in_flight=config.cache.share_prefix_in_flight,
            priorities=config.schedule.scheduling_policy is SchedulingPolicy.PRIORITY,
            patience=config.schedule.scheduling_patience or None,
            max_queued_requests=config.schedule.max_num_queued_reqs,
            max_queued_tokens=config.schedule.max_num_queued_tokens,
            max_model_tokens=specs.model.max_model_len,
            num_host_pages=specs.num_host_pages,
            host_write_policy=config.cache.kvstore_write_policy or WritePolicy.WRITE_THROUGH,
            num_snapshot_pages=specs.num_snapshot_pages,
            max_retracted_requests=specs.max_retracted_requests,
            debug_force_retraction_interval=config.cache.debug_force_retraction_interval,
        )

    @property
    def adjustable(self) -> Adjustments:
        """What of it may change while the scheduler runs."""
        return Adjustments(
            chunked_prefill_size=self.max_scheduled_tokens,
            mixed_batch=self.mixed_batch,
            mixed_prefill_tokens=self.mixed_prefill_tokens,
            max_num_queued_reqs=self.max_queued_requests,
            max_num_queued_tokens=self.max_queued_tokens,
        )

    def adjusted(self, changes: Adjustments) -> Self:
        """Return the configuration after changes. Raises ConfigError for one that cannot be."""
        asked = {
            name: value
            for name, value in (
                ("max_scheduled_tokens", changes.chunked_prefill_size),
                ("mixed_batch", changes.mixed_batch),
                ("mixed_prefill_tokens", changes.mixed_prefill_tokens),
                ("max_queued_requests", changes.max_num_queued_reqs),
                ("max_queued_tokens", changes.max_num_queued_tokens),
            )
            if value is not UNSET
        }
        return replace(self, **asked)

    def __post_init__(self) -> None:
        for name in ("prefix_granularity", "max_rows", "max_scheduled_tokens", "decode_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, not {getattr(self, name)}")
        if self.num_pages < 2:  # noqa: PLR2004 - the null page and one that holds something
            raise ConfigError("num_pages", f"must be at least 2, not {self.num_pages}")
        _check_flow(self.stages, self.overlap_depth)
        for name in (
            "mixed_prefill_tokens",
            "patience",
            "max_queued_requests",
            "max_queued_tokens",
        ):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ConfigError(name, f"{limit} is below 1")
        if self.prefix_replay_tokens < 0:
            raise ConfigError("prefix_replay_tokens", f"{self.prefix_replay_tokens} is below 0")
        if self.num_host_pages < 1:
            raise ConfigError("num_host_pages", f"must be at least 1, not {self.num_host_pages}")
        if self.num_host_pages > 1 and not self.prefix_caching:
            raise ConfigError("num_host_pages", "a host tier keeps prefixes, which are not cached")
        if self.storage is not None and self.storage.max_host_blocks >= self.num_host_pages:
            raise ConfigError(
                "storage.max_host_blocks",
                f"{self.storage.max_host_blocks} blocks of a host tier of "
                f"{self.num_host_pages - 1} pages: some must be left for others",
            )
        if self.role is Role.PREFILL and self.num_snapshot_pages > 1:
            raise ConfigError("num_snapshot_pages", "a prefill engine suspends nobody")
        if self.role is Role.DECODE and self.storage is not None:
            raise ConfigError("storage", "a decode engine gets its prompts from its peers")
        if self.num_snapshot_pages < 1 or (self.num_snapshot_pages > 1) != (
            self.max_retracted_requests > 0
        ):
            raise ConfigError(
                "num_snapshot_pages",
                f"{self.num_snapshot_pages} pages for {self.max_retracted_requests} suspended "
                "requests: images need both a pool and a limit, or neither",
            )
        if self.debug_force_retraction_interval and not self.max_retracted_requests:
            raise ConfigError("debug_force_retraction_interval", "needs a snapshot pool")
        _check_groups(self.groups, self.prefix_granularity)


def _check_flow(stages: int, overlap_depth: int) -> None:
    if stages < 1:
        raise ConfigError("stages", f"must be at least 1, not {stages}")
    if overlap_depth not in (0, 1):
        raise ConfigError("overlap_depth", f"must be 0 or 1, not {overlap_depth}")
    if stages > 1 and overlap_depth:
        raise ConfigError("overlap_depth", "rows of a pipeline wait for their results: it is 0")


def _check_groups(groups: tuple[CacheGroup, ...], prefix_granularity: int) -> None:
    if not groups:
        raise ConfigError("groups", "at least one cache group is needed")
    for group in groups:
        _check_group(group, prefix_granularity)
    kinds = [group.kind is AttentionKind.STATE for group in groups]
    if kinds[0]:
        raise ConfigError("groups", "a group that keeps tokens must come before state groups")
    if kinds != sorted(kinds):
        raise ConfigError("groups", "state groups must come behind all others")


def _check_group(group: CacheGroup, prefix_granularity: int) -> None:
    name = f"groups[{group.group_id}]"
    stateful = group.kind is AttentionKind.STATE
    windowed = group.kind is AttentionKind.SLIDING_WINDOW
    if windowed != (group.window_tokens is not None) or (group.window_tokens or 1) < 1:
        raise ConfigError(name, f"window_tokens {group.window_tokens} of a {group.kind} group")
    if stateful and group.block_tokens:
        raise ConfigError(name, f"block_tokens {group.block_tokens} of a state group is not 0")
    if not stateful and (group.block_tokens < 1 or prefix_granularity % group.block_tokens):
        raise ConfigError(
            name,
            f"block_tokens {group.block_tokens} does not divide "
            f"prefix_granularity {prefix_granularity}",
        )
    if group.blocks_per_parent < 1:
        raise ConfigError(name, f"blocks_per_parent {group.blocks_per_parent} is below 1")

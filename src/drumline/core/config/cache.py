"""How much KV memory there is, and how it is shared."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from drumline.core.config.fields import Gigabytes, NotNegative, Positive, Share, flags, parse_bytes
from drumline.core.errors import ConfigError


class WritePolicy(StrEnum):
    """When pages are written to the host cache."""

    WRITE_THROUGH = "write_through"
    WRITE_BACK = "write_back"


class KvCacheDtype(StrEnum):
    """What keys and values are kept as."""

    AUTO = "auto"
    """The type of activations, but bfloat16 beside weights that stay small integers."""
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    INT8 = "int8"
    """With a float32 step for each token and KV head."""


DEFAULT_KVSTORE_RATIO = 2.0
DEFAULT_KV_CACHE_SIZE = "2GiB"
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


class CacheConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much KV memory there is, and how it is shared."""

    kv_cache_dtype: Annotated[
        KvCacheDtype,
        Meta(
            description="what keys and values are kept as: auto is the type of --dtype, or "
            "bfloat16 where weights stay small integers; int8, with a scale for each token and "
            "head, holds about twice as many tokens as bfloat16 in the same memory"
        ),
    ] = KvCacheDtype.AUTO
    kv_cache_size: Annotated[
        str | None,
        Meta(
            description=f"memory for KV pages, such as 2GiB or 512MiB; {DEFAULT_KV_CACHE_SIZE} by "
            "default, but on CUDA what --gpu-memory-utilization leaves",
            extra=flags("--kv-cache-memory-bytes"),
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        Share | None,
        Meta(
            description="share of the device's memory (on a CPU, of the available memory) "
            "to use in place of --kv-cache-size; on CUDA "
            f"{DEFAULT_GPU_MEMORY_UTILIZATION} where nothing sizes the KV pool",
            extra=flags("--mem-fraction-static"),
        ),
    ] = None
    max_total_tokens: Annotated[
        Positive | None,
        Meta(description="KV pool in tokens, in place of --kv-cache-size"),
    ] = None
    prefix_granularity: Annotated[
        Positive,
        Meta(
            description="tokens per hashed prefix page; a multiple of the device page",
            extra=flags("--block-size", "--page-size"),
        ),
    ] = 64
    prefix_caching: Annotated[
        bool,
        Meta(
            description="reuse the KV pages of prefixes computed before",
            extra={
                "off": [
                    "--disable-prefix-caching",
                    "--no-enable-prefix-caching",
                    "--disable-radix-cache",
                ],
                "flags": ["--enable-prefix-caching"],
            },
        ),
    ] = True
    share_prefix_in_flight: Annotated[
        bool,
        Meta(
            description="let requests wait for a prefix that another one is computing now, "
            "in place of computing it too",
        ),
    ] = True
    promote_window_prefixes: Annotated[
        bool,
        Meta(
            description="where sliding windows alone lack a prefix that is cached, have whoever "
            "computes it keep it for them too",
        ),
    ] = True
    kvstore: Annotated[
        bool,
        Meta(
            description="keep prefix pages in host memory once they leave the KV pool (pinned on "
            "CUDA, from which they come back on a stream of their own); on a CPU, "
            "where both are the same memory, a larger --kv-cache-size does the same without copies",
            extra={
                "flags": ["--enable-kvstore", "--enable-hierarchical-cache"],
                "off": ["--disable-kvstore"],
            },
        ),
    ] = False
    kvstore_size: Annotated[
        str | None,
        Meta(
            description="memory of the host cache, such as 8GiB; a bare number counts gigabytes",
            extra=flags("--hicache-size", "--kv-offloading-size"),
        ),
    ] = None
    kvstore_ratio: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        Meta(
            description="host cache as a multiple of the KV pool, where --kvstore-size is not "
            f"set; {DEFAULT_KVSTORE_RATIO} by default",
            extra=flags("--hicache-ratio"),
        ),
    ] = None
    kvstore_write_policy: Annotated[
        WritePolicy | None,
        Meta(
            description="write pages to the host cache when they are complete (write_through, the "
            "default), or when the KV pool gives them away (write_back)",
        ),
    ] = None
    retraction_snapshot_host_gb: Annotated[
        Gigabytes | None,
        Meta(
            description="gigabytes of host memory for requests that are suspended when the KV "
            "pool is full, taken as it is needed; 0 aborts the newest request in their place. "
            "As large as the KV pool by default, at most a quarter of the memory left beside it, "
            "and at most 8 GiB on CUDA, where it is pinned at the start",
        ),
    ] = None
    retraction_snapshot_max_requests: Annotated[
        NotNegative | None,
        Meta(
            description="requests that may be suspended at the same time; --max-num-seqs by "
            "default, 0 aborts the newest request in their place",
        ),
    ] = None
    debug_force_retraction_interval: Annotated[
        NotNegative,
        Meta(
            description="suspend a request every so many plans, to test that it changes nothing; "
            "0 is never",
        ),
    ] = 0

    def __post_init__(self) -> None:
        if self.kv_cache_size is not None:
            parse_bytes("--kv-cache-size", self.kv_cache_size)
        if self.kvstore_size is not None:
            parse_bytes("--kvstore-size", self.kvstore_size, "gb")
        if self.kvstore and not self.prefix_caching:
            raise ConfigError(
                "--enable-kvstore",
                "keeps the pages of prefixes, which --disable-prefix-caching forbids",
            )
        if not self.kvstore:
            for flag, value in (
                ("--kvstore-size", self.kvstore_size),
                ("--kvstore-ratio", self.kvstore_ratio),
                ("--kvstore-write-policy", self.kvstore_write_policy),
            ):
                if value is not None:
                    raise ConfigError(flag, "has no effect without --enable-kvstore")
        self._check_snapshots()

    def _check_snapshots(self) -> None:
        """Raise ConfigError where suspended requests are asked for that nothing is left for."""
        memory = "--retraction-snapshot-host-gb", self.retraction_snapshot_host_gb
        count = "--retraction-snapshot-max-requests", self.retraction_snapshot_max_requests
        forced = "--debug-force-retraction-interval", self.debug_force_retraction_interval
        for void, zero in ((count, memory), (memory, count), (forced, memory), (forced, count)):
            if void[1] and zero[1] == 0:
                raise ConfigError(void[0], f"has no effect beside {zero[0]} 0")

"""How memory is shared out: weights, the KV pool, and the host tiers beside it.

It turns what an operator asked for and what the machine has left into numbers of pages,
and allocates nothing.
"""

import math
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from msgspec import Struct
from msgspec.structs import replace

from drumline.core.config import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_KV_CACHE_SIZE,
    DEFAULT_KVSTORE_RATIO,
    CacheConfig,
    Config,
    parse_bytes,
)
from drumline.core.errors import ConfigError, PeerError
from drumline.device.choice import Room, room_of
from drumline.device.host_cache import HostSizes
from drumline.device.page import BLOCK_TOKENS

MIB = 1 << 20
_CPU = torch.device("cpu")

_LEAST_PAGES = 2
"""The null page, and one to use."""
_WORKSPACE_BYTES = 256 * MIB
"""What a forward needs beside weights and pool, roughly."""
_CUDA_WORKSPACE_BYTES = 2048 * MIB
"""As much on CUDA, where rows of the vocabulary are sorted whole and libraries take their part."""


class Budget(Struct, frozen=True):
    """What there is memory for. Pages count the null page."""

    pages: int
    page_bytes: int
    host: HostSizes

    @property
    def pool_bytes(self) -> int:
        return self.pages * self.page_bytes


def budget_of(
    config: Config,
    page_bytes: int,
    weight_bytes: int,
    least: Callable[[int], int],
    device: torch.device = _CPU,
) -> Budget:
    """Return what fits beside this rank's weights; the same on every rank of the replica.

    `least` returns the smallest of what they give it.

    Collective: every rank of the replica. Raises ConfigError naming the flag that asks for too
    much, on the rank that it is too much for, and PeerError on the others.
    """
    # Shared with the other ranks of this machine, which start at the same time.
    host = available_bytes() // config.parallel.local_ranks
    room, workspace, cache = Room(host, host), _WORKSPACE_BYTES, config.cache
    if device.type == "cuda":
        room, workspace = room_of(device), _CUDA_WORKSPACE_BYTES
        cache = _on_cuda(cache)
    refusal = None
    try:
        pages = pool_pages(cache, page_bytes, weight_bytes, room, workspace)
    except ConfigError as error:
        # The others are on their way into the agreement, and would wait there for this one.
        refusal, pages = error, 0
    pages = least(pages)
    if refusal is not None:
        raise refusal
    if not pages:
        raise PeerError("another rank of the replica has no memory for the KV pool")
    pinned = device.type != "cpu"
    taken = 0 if pinned else weight_bytes + workspace + pages * page_bytes
    left = least(host - taken)
    return Budget(pages, page_bytes, host_sizes(config, pages, page_bytes, left, pinned=pinned))


def _on_cuda(cache: CacheConfig) -> CacheConfig:
    """Return what sizes the KV pool where the device's memory is there for it alone."""
    sizes = cache.kv_cache_size, cache.max_total_tokens, cache.gpu_memory_utilization
    if any(size is not None for size in sizes):
        return cache
    return replace(cache, gpu_memory_utilization=DEFAULT_GPU_MEMORY_UTILIZATION)


def available_bytes() -> int:
    """Return the memory this process may still take: the machine's or its control group's."""
    available: int = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            available = min(available, int(text) - int(used.read_text()))
    return available


def pool_pages(
    cache: CacheConfig,
    page_bytes: int,
    weight_bytes: int,
    memory: Room,
    workspace: int = _WORKSPACE_BYTES,
) -> int:
    """Return how many pages the KV pool has, the null page included.

    Raises ConfigError naming the flag that sized it where the pool holds no page, or
    does not fit beside the weights into what is available.
    """
    beside = weight_bytes + workspace
    available, taken = memory.available, memory.total - memory.available
    room = available - beside
    needs = f"weights and workspace take {beside // MIB} MiB, {available // MIB} MiB are available"
    most = _mib(room)
    least = _mib(_LEAST_PAGES * page_bytes + MIB - 1)
    if cache.max_total_tokens is not None:
        flag = "--max-total-tokens"
        pages = -(-cache.max_total_tokens // BLOCK_TOKENS) + 1
        most = str((room // page_bytes - 1) * BLOCK_TOKENS)
    elif cache.gpu_memory_utilization is not None:
        flag = "--gpu-memory-utilization"
        share = int(memory.total * cache.gpu_memory_utilization)
        pages = (share - taken - beside) // page_bytes
        most = "1.0"
        needed = taken + beside + _LEAST_PAGES * page_bytes
        least = f"{math.ceil(100 * needed / memory.total) / 100}"
    else:
        flag = "--kv-cache-size"
        pages = parse_bytes(flag, cache.kv_cache_size or DEFAULT_KV_CACHE_SIZE) // page_bytes
    if room < _LEAST_PAGES * page_bytes:
        raise ConfigError(
            flag,
            f"no value of it helps: {needs}, which leaves no room for KV pages; take a smaller "
            "model, a smaller --dtype, fewer ranks on this machine, or more memory",
        )
    if pages < _LEAST_PAGES:
        raise ConfigError(
            flag,
            f"leaves room for {max(0, pages)} KV pages of {page_bytes} bytes, at least "
            f"{_LEAST_PAGES} are needed ({needs}); raise it to {least} or more",
        )
    if pages * page_bytes > room:
        raise ConfigError(
            flag,
            f"asks for {pages * page_bytes // MIB} MiB of KV pages, which is too much: {needs}; "
            f"lower it to {most} or less",
        )
    return pages


def _mib(size: int) -> str:
    """Return a size as flags take it, in whole MiB and no larger."""
    return f"{max(0, size) // MIB}MiB"


_SNAPSHOT_SHARE = 4
"""Of what is left of the memory, one part in so many may hold suspended requests by default."""
_PINNED_SNAPSHOT_BYTES = 8192 * MIB
"""At most as much, by default, of memory that is pinned: that is taken whole at the start."""


def host_sizes(
    config: Config, pages: int, page_bytes: int, left: int, *, pinned: bool = False
) -> HostSizes:
    """Return the sizes of the host tiers beside a KV pool of `pages` pages.

    `left` bytes of memory are not spoken for yet. The host cache is off by default: on a
    CPU it would be the KV pool's own kind of memory, with copies in between. The pool of
    suspended requests is on, as its memory is taken only once requests are suspended; one
    of the KV pool's size holds whatever that pool had to give away at a time. Memory that is
    `pinned`, beside CUDA, is taken at once.

    Raises ConfigError naming the flag that asks for what is not there, or for nothing.
    """
    cache = config.cache
    host = _host_pages(cache, pages, page_bytes, left)
    left -= (host - 1) * page_bytes
    retracted = cache.retraction_snapshot_max_requests
    if retracted is None:
        retracted = config.schedule.max_num_seqs
    flag = "--retraction-snapshot-host-gb"
    asked = cache.retraction_snapshot_host_gb
    if asked is None:
        most_bytes = max(0, left) // _SNAPSHOT_SHARE
        if pinned:
            most_bytes = min(most_bytes, _PINNED_SNAPSHOT_BYTES)
        images = min(pages - 1, most_bytes // page_bytes)
    else:
        most = f"{math.floor(max(0, left) / 1e7) / 100}"
        images = _fitting(flag, int(asked * 1e9), page_bytes, left, most) if asked else 0
    if not images or not retracted:
        return HostSizes(host_pages=host)
    return HostSizes(host_pages=host, snapshot_pages=images + 1, max_retracted=retracted)


def _host_pages(cache: CacheConfig, pages: int, page_bytes: int, left: int) -> int:
    if not cache.kvstore:
        return 1
    if cache.kvstore_size is None:
        pool = (pages - 1) * page_bytes
        flag = "--kvstore-ratio"
        size = int(pool * (cache.kvstore_ratio or DEFAULT_KVSTORE_RATIO))
        most = f"{math.floor(100 * max(0, left) / pool) / 100}"
    else:
        flag, most = "--kvstore-size", _mib(left)
        size = parse_bytes(flag, cache.kvstore_size, "gb")
    return _fitting(flag, size, page_bytes, left, most) + 1


def _fitting(flag: str, size: int, page_bytes: int, left: int, most: str) -> int:
    """Return how many pages `size` bytes hold.

    Raises ConfigError if it is none, or too many; `most` is what `flag` may say at most.
    """
    pages = size // page_bytes
    if not pages:
        raise ConfigError(flag, f"{size} bytes hold no page, which takes {page_bytes} bytes")
    if pages * page_bytes > left:
        raise ConfigError(
            flag,
            f"asks for {pages * page_bytes // MIB} MiB of host memory; beside weights, workspace "
            f"and KV pool {max(0, left) // MIB} MiB are left; lower it to {most} or less",
        )
    return pages

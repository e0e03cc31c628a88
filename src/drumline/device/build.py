"""Building the device: everything complete, returned by how long it may be held.

It resolves what an operator left open (float type, context, size of the KV pool)
against the checkpoint and the machine. What is needed only at start-up stays here.
"""

import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from msgspec import Struct

from drumline.contract.specs import CacheGroup, DeviceSpecs, ModelFacts
from drumline.core.clock import SystemClock
from drumline.core.config import CacheConfig, Config, Dtype, parse_bytes
from drumline.core.errors import ConfigError
from drumline.core.model_files import find_model
from drumline.device.attention import TorchAttention
from drumline.device.executor import Executor
from drumline.device.forward_thread import ForwardThread
from drumline.device.handle import DeviceHandle
from drumline.device.host_cache import HostCache, HostSizes
from drumline.device.kv import BLOCK_TOKENS, BlockTable, KvPool
from drumline.device.layers import Backend, TorchLinear
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.models.config import DecoderConfig
from drumline.device.models.decoder import load_decoder, weight_count
from drumline.device.models.shard import most_kv_heads, shard_of
from drumline.device.parallel import Alone, TensorGroup
from drumline.device.sampling.sampler import Sampler

_log = logging.getLogger(__name__)

_DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}
_MIB = 1 << 20
_MANY_WEIGHTS = 1_000_000_000
_LEAST_PAGES = 2
"""The null page, and one to use."""
_WORKSPACE_BYTES = 256 * _MIB
"""What a forward needs beside weights and pool, roughly."""


class StartUp(Struct, frozen=True):
    """What is of use only while the rank starts."""

    load_ms: int
    pool_bytes: int


class DeviceBuild(Struct, frozen=True):
    """The device: specs are kept for ever, the handle goes to the data plane, the rest is spent."""

    specs: DeviceSpecs
    handle: DeviceHandle
    startup: StartUp


def build(config: Config, thread: ForwardThread, group: TensorGroup | None = None) -> DeviceBuild:
    """Load the model and make its memory, on the forward thread.

    With a `group`, this rank's part of both. Collective: every member. Raises ConfigError
    naming the flag or file that cannot be served, with the numbers that clash.
    """
    return thread.call(lambda: _build(config, group or Alone()))


def _build(config: Config, group: TensorGroup) -> DeviceBuild:
    clock = SystemClock()
    started = clock.now_us()
    files = find_model(config.model.model)
    checkpoint = open_checkpoint(files)
    model = checkpoint.config
    max_model_len = _context(config, model)
    dtype = _resolve_dtype(config.model.dtype, model.stored_dtype)
    granularity = config.cache.prefix_granularity
    if granularity % BLOCK_TOKENS:
        raise ConfigError(
            "--prefix-granularity",
            f"{granularity} is no multiple of the device page of {BLOCK_TOKENS} tokens",
        )
    shard = shard_of(model, group.index, group.size)
    # Of the rank that holds most: all of a group have as many pages.
    kv_heads = most_kv_heads(model, group.size)
    page_bytes = 2 * model.layers * kv_heads * model.head_dim * BLOCK_TOKENS * dtype.itemsize
    weight_bytes = weight_count(model, shard) * dtype.itemsize
    # Before anything is loaded, so that an oversized model is refused and not killed. What is
    # available is shared with the other ranks of this machine, which start at the same time.
    available = available_bytes() // config.parallel.local_ranks
    pages = group.least(pool_pages(config.cache, page_bytes, weight_bytes, available))
    left = group.least(available - weight_bytes - _WORKSPACE_BYTES - pages * page_bytes)
    sizes = host_sizes(config, pages, page_bytes, left)

    device = torch.device("cpu")
    backend = Backend("torch", TorchLinear, TorchAttention)
    with _load_threads(weight_count(model, shard)):
        decoder = load_decoder(model, checkpoint.weights, backend, dtype, device, group)
    pool = KvPool(
        layers=model.layers,
        blocks=pages,
        block_tokens=BLOCK_TOKENS,
        kv_heads=len(shard.kv_heads),
        head_dim=model.head_dim,
        dtype=dtype,
        device=device,
    )
    rows = config.schedule.max_num_seqs + 1
    sampler = Sampler(rows, model.vocab_size)
    # One column more than the context fills: the block a last token would be written to.
    table = BlockTable(rows, max_model_len // BLOCK_TOKENS + 1)
    executor = Executor(decoder, backend.attention(pool), sampler, rows, BLOCK_TOKENS)
    cache = HostCache(pool, executor, sizes)
    load_ms = (clock.now_us() - started) // 1000
    dtype_name = str(dtype).removeprefix("torch.")
    _log.info(
        "loaded %s in %d ms: %s back end, %s on cpu, %d threads; KV pool: %d pages of %d tokens, "
        "%d MiB; host cache: %d pages; suspended requests: %d pages",
        files.name,
        load_ms,
        backend.name,
        dtype_name,
        torch.get_num_threads(),
        pages - 1,
        BLOCK_TOKENS,
        pages * page_bytes // _MIB,
        sizes.host_pages - 1,
        sizes.snapshot_pages - 1,
    )
    names = config.model.served_model_name
    specs = DeviceSpecs(
        model=ModelFacts(
            name=names[0] if names else files.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=model.eos_token_ids,
            dtype=dtype_name,
        ),
        groups=(CacheGroup(group_id="full", block_tokens=BLOCK_TOKENS),),
        num_pages=pages,
        bytes_per_page=page_bytes,
        prefix_granularity=granularity,
        max_rows=config.schedule.max_num_seqs,
        max_scheduled_tokens=config.schedule.chunked_prefill_size,
        backend=backend.name,
        num_host_pages=sizes.host_pages,
        num_snapshot_pages=sizes.snapshot_pages,
        max_retracted_requests=sizes.max_retracted,
    )
    handle = DeviceHandle(executor, pool, table, sampler, cache)
    return DeviceBuild(specs, handle, StartUp(load_ms, pages * page_bytes))


@contextmanager
def _load_threads(weights: int) -> Iterator[None]:
    """Read a small model with one thread.

    Reading is thousands of short operations. Shared among threads, each ends in a
    barrier, which costs milliseconds wherever another process holds one of the cores.
    """
    threads = torch.get_num_threads()
    if weights < _MANY_WEIGHTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _context(config: Config, model: DecoderConfig) -> int:
    asked = config.model.max_model_len
    if asked is not None and asked > model.max_positions:
        raise ConfigError(
            "--max-model-len", f"{asked} is beyond the model's context of {model.max_positions}"
        )
    return asked or model.max_positions


def _resolve_dtype(asked: Dtype, stored: str) -> torch.dtype:
    """Return the float type to compute in; `auto` takes the checkpoint's where that is native."""
    if asked is not Dtype.AUTO:
        return _DTYPES[asked]
    if stored == "float32":
        return torch.float32
    # Quantized checkpoints were made from half-precision ones. float16 overflows where
    # bfloat16 does not, and no processor here is quicker at it.
    if has_native_bfloat16():
        return torch.bfloat16
    _log.info(
        "computing in float32: the checkpoint is %s, and this processor has no native bfloat16",
        stored,
    )
    return torch.float32


def has_native_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices by instructions of its own."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.is_file():
        return False
    flags = next(
        (line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), ""
    )
    return "avx512_bf16" in flags.split() or "amx_bf16" in flags.split()


def available_bytes() -> int:
    """Return the memory this process may still take: the machine's or its control group's."""
    available: int = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            available = min(available, int(text) - int(used.read_text()))
    return available


def pool_pages(cache: CacheConfig, page_bytes: int, weight_bytes: int, available: int) -> int:
    """Return how many pages the KV pool has, the null page included.

    Raises ConfigError naming the flag that sized it where the pool holds no page, or
    does not fit beside the weights into the `available` bytes.
    """
    beside = weight_bytes + _WORKSPACE_BYTES
    if cache.max_total_tokens is not None:
        flag = "--max-total-tokens"
        pages = -(-cache.max_total_tokens // BLOCK_TOKENS) + 1
    elif cache.gpu_memory_utilization is not None:
        flag = "--gpu-memory-utilization"
        pages = (int(available * cache.gpu_memory_utilization) - beside) // page_bytes
    else:
        flag = "--kv-cache-size"
        pages = parse_bytes(flag, cache.kv_cache_size) // page_bytes
    has = f"{available // _MIB} MiB are available"
    if pages < _LEAST_PAGES:
        raise ConfigError(
            flag,
            f"leaves room for {max(0, pages)} KV pages of {page_bytes} bytes, at least "
            f"{_LEAST_PAGES} are needed; weights and workspace take {beside // _MIB} MiB, {has}",
        )
    if pages * page_bytes + beside > available:
        raise ConfigError(
            flag,
            f"asks for {pages * page_bytes // _MIB} MiB of KV pages; with {beside // _MIB} MiB of "
            f"weights and workspace that is too much: {has}",
        )
    return pages


_SNAPSHOT_SHARE = 4
"""Of what is left of the memory, one part in so many may hold suspended requests by default."""


def host_sizes(config: Config, pages: int, page_bytes: int, left: int) -> HostSizes:
    """Return the sizes of the host tiers beside a KV pool of `pages` pages.

    `left` bytes of memory are not spoken for yet. The host cache is off by default: on a
    CPU it would be the KV pool's own kind of memory, with copies in between. The pool of
    suspended requests is on, as its memory is taken only once requests are suspended; one
    of the KV pool's size holds whatever that pool had to give away at a time.

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
        images = min(pages - 1, max(0, left) // _SNAPSHOT_SHARE // page_bytes)
    else:
        images = _fitting(flag, int(asked * 1e9), page_bytes, left) if asked else 0
    if not images or not retracted:
        return HostSizes(host_pages=host)
    return HostSizes(host_pages=host, snapshot_pages=images + 1, max_retracted=retracted)


def _host_pages(cache: CacheConfig, pages: int, page_bytes: int, left: int) -> int:
    if not cache.kvstore:
        if cache.kvstore_size is not None:
            raise ConfigError("--kvstore-size", "has no effect without --enable-kvstore")
        return 1
    if not cache.prefix_caching:
        raise ConfigError(
            "--enable-kvstore",
            "keeps the pages of prefixes, which --disable-prefix-caching forbids",
        )
    if cache.kvstore_size is None:
        flag, size = "--kvstore-ratio", int((pages - 1) * page_bytes * cache.kvstore_ratio)
    else:
        flag = "--kvstore-size"
        size = parse_bytes(flag, cache.kvstore_size, "gb")
    return _fitting(flag, size, page_bytes, left) + 1


def _fitting(flag: str, size: int, page_bytes: int, left: int) -> int:
    """Return how many pages `size` bytes hold. Raises ConfigError if it is none, or too many."""
    pages = size // page_bytes
    if not pages:
        raise ConfigError(flag, f"{size} bytes hold no page, which takes {page_bytes} bytes")
    if pages * page_bytes > left:
        raise ConfigError(
            flag,
            f"asks for {pages * page_bytes // _MIB} MiB of host memory; beside weights, workspace "
            f"and KV pool {max(0, left) // _MIB} MiB are left",
        )
    return pages

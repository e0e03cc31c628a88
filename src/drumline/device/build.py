"""Building the device: everything complete, returned by how long it may be held.

What an operator left open is settled by `backends` for kernels and float types, by `budget` for
memory. What is needed only at start-up stays here.
"""

import logging
from functools import partial

import torch
from msgspec import Struct

from drumline.contract.specs import CacheGroup, DeviceSpecs, ModelFacts
from drumline.core.clock import SystemClock
from drumline.core.config import DEFAULT_MOST_GRAPH_ROWS, Config, WeightUpdatePolicy
from drumline.core.errors import ConfigError
from drumline.core.model_files import find_model
from drumline.device.backends import chosen
from drumline.device.budget import MIB, available_bytes, budget_of
from drumline.device.choice import device_of, name_of, room_of, use
from drumline.device.executor import Executor
from drumline.device.flashinfer_attention import FlashInferAttention
from drumline.device.forward_thread import ForwardThread
from drumline.device.graphs import CudaRecorder, DecodeGraphs, sizes_up_to
from drumline.device.handle import DeviceHandle
from drumline.device.history import TokenHistory
from drumline.device.host_cache import HostCache
from drumline.device.kv import BlockTable, KvPool
from drumline.device.models.checkpoint import open_checkpoint
from drumline.device.models.config import context_tokens
from drumline.device.models.shard import most_kv_heads, most_layers, shard_of
from drumline.device.page import BLOCK_TOKENS, check_granularity
from drumline.device.parallel import Alone, Passage, SingleStage, Stages, TensorGroup
from drumline.device.profiler import Profiler
from drumline.device.sampling.processors import load_processors
from drumline.device.sampling.sampler import Sampler
from drumline.device.serving_weights import ServingWeights
from drumline.device.weight_loader import WeightLoader

_log = logging.getLogger(__name__)

_COPY_THREADS = 8
"""Threads that copy between KV pool and host memory: a few use up the memory's bandwidth."""


class StartUp(Struct, frozen=True):
    """What is of use only while the rank starts."""

    load_ms: int
    pool_bytes: int
    device: torch.device


class DeviceBuild(Struct, frozen=True):
    """The device: specs are kept for ever, the handle goes to the data plane, the rest is spent."""

    specs: DeviceSpecs
    handle: DeviceHandle
    startup: StartUp


def build(
    config: Config,
    thread: ForwardThread,
    group: TensorGroup | None = None,
    stages: Stages | None = None,
    device: torch.device | None = None,
) -> DeviceBuild:
    """Load the model and make its memory, on the forward thread.

    With a `group`, this rank's part of both, and with `stages`, of this stage's layers; without
    a `device`, on the one that a rank alone would take.
    Collective: every member of both. Raises ConfigError naming the flag or file that cannot be
    served, with the numbers that clash.
    """

    def built() -> DeviceBuild:
        where = device or device_of(config.model.device)
        use(where)
        return _build(config, group or Alone(), stages or SingleStage(), where)

    return thread.call(built)


def _build(config: Config, group: TensorGroup, stages: Stages, device: torch.device) -> DeviceBuild:
    clock = SystemClock()
    started = clock.now_us()
    files = find_model(config.model.model)
    checkpoint = open_checkpoint(files)
    model = checkpoint.config
    max_model_len = context_tokens(config.model.max_model_len, model)
    granularity = config.cache.prefix_granularity
    check_granularity(granularity)
    shard = shard_of(model, group.index, group.size, stages.index, stages.size)
    how = chosen(config.model, model, group.size, config.cache.kv_cache_dtype, device, shard)
    dtype, backend = how.dtype, how.backend
    # Of the rank that holds most: all of a replica have as many pages.
    kv_heads, layers = most_kv_heads(model, group.size), most_layers(model, stages.size)
    page_bytes = 2 * layers * how.kv_form.side_bytes(BLOCK_TOKENS, kv_heads, model.head_dim)

    def available() -> int:
        return available_bytes() if device.type == "cpu" else room_of(device).available

    loader = WeightLoader(model, backend, dtype, device, group, how.apportioned, available, shard)
    # Before anything is loaded, so that an oversized model is refused and not killed.
    budget = budget_of(
        config,
        page_bytes,
        loader.bytes_of(checkpoint),
        lambda value: stages.least(group.least(value)),
        device,
    )
    loaded = loader.load(checkpoint)
    pool = KvPool(
        layers=len(shard.layers),
        blocks=budget.pages,
        block_tokens=BLOCK_TOKENS,
        kv_heads=len(shard.kv_heads),
        head_dim=model.head_dim,
        form=how.kv_form,
        device=device,
    )
    rows = config.schedule.max_num_seqs + 1
    sampler = Sampler(
        rows,
        model.vocab_size,
        load_processors(config.model.logits_processors, model.vocab_size),
        device=device,
        alone=config.model.deterministic,
        machine=how.machine,
    )
    # One column more than the context fills: the block a last token would be written to.
    table = BlockTable(rows, max_model_len // BLOCK_TOKENS + 1)
    need = loaded.decoder.history
    history = TokenHistory(rows, max_model_len, device) if need is not None else None
    attention = backend.attention(pool)
    # Between layers of one call all is float32.
    passage = Passage(stages, model.hidden_size, torch.float32 if backend.one_call else dtype)
    graphs = None
    if isinstance(attention, FlashInferAttention) and history is None:
        graphs = _graphs(config, attention, table, passage.first, model.hidden_size, dtype)
    executor = Executor(
        loaded.decoder, attention, sampler, rows, pool.shape, passage, history, graphs
    )
    cache = HostCache(
        pool, executor, budget.host, min(torch.get_num_threads(), _COPY_THREADS), clock
    )
    dtype_name = str(dtype).removeprefix("torch.")
    load_ms = (clock.now_us() - started) // 1000
    _log.info(
        "loaded %s in %d ms: %s back end, %s on %s, %d threads; KV pool: %s, %d pages of %d "
        "tokens, %d MiB; host cache: %d pages; suspended requests: %d pages",
        files.name,
        load_ms,
        backend.name,
        dtype_name,
        device,
        torch.get_num_threads(),
        how.kv_form.name,
        budget.pages - 1,
        BLOCK_TOKENS,
        budget.pool_bytes // MIB,
        budget.host.host_pages - 1,
        budget.host.snapshot_pages - 1,
    )
    if graphs is not None:
        _record(executor, graphs, clock)
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
        num_pages=budget.pages,
        bytes_per_page=page_bytes,
        prefix_granularity=granularity,
        max_rows=config.schedule.max_num_seqs,
        max_scheduled_tokens=config.schedule.chunked_prefill_size,
        backend=backend.name,
        device=name_of(device),
        kv_dtype=how.kv_form.name,
        num_host_pages=budget.host.host_pages,
        num_snapshot_pages=budget.host.snapshot_pages,
        max_retracted_requests=budget.host.max_retracted,
        history=need,
        discards_weights=config.model.weight_update_policy is WeightUpdatePolicy.DISCARD,
    )
    serving = ServingWeights(
        loaded,
        loader,
        executor,
        clock,
        discards=specs.discards_weights,
        timeout_s=config.model.weight_update_timeout,
    )
    handle = DeviceHandle(executor, pool, table, sampler, cache, serving, Profiler(device, clock))
    return DeviceBuild(specs, handle, StartUp(load_ms, budget.pool_bytes, device))


def _record(executor: Executor, graphs: DecodeGraphs, clock: SystemClock) -> None:
    """Record decodes. Raises ConfigError where the device has no memory left for that."""
    started = clock.now_us()
    try:
        executor.record()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "--cuda-graph-max-bs",
            f"no memory is left for the {len(graphs.sizes)} graphs of up to {graphs.sizes[-1]} "
            "rows; lower it or --gpu-memory-utilization, or say --disable-cuda-graph",
        ) from error
    _log.info(
        "recorded decodes of %d sizes, up to %d rows, in %d ms",
        len(graphs.sizes),
        graphs.sizes[-1],
        (clock.now_us() - started) // 1000,
    )


@torch.inference_mode()
def _graphs(
    config: Config,
    attention: FlashInferAttention,
    table: BlockTable,
    fed_tokens: bool,
    width: int,
    dtype: torch.dtype,
) -> DecodeGraphs | None:
    """Return what decodes are recorded in, in the sizes an operator asks for; None without any."""
    asked, schedule = config.graph, config.schedule
    if not asked.cuda_graph:
        return None
    most = asked.cuda_graph_max_bs or min(schedule.max_num_seqs, DEFAULT_MOST_GRAPH_ROWS)
    sizes = asked.cuda_graph_bs or sizes_up_to(most)
    attention.reserve(max(sizes), table.columns)
    device, shape = attention.pool.device, (max(sizes), width)
    return DecodeGraphs(
        sizes,
        torch.zeros(max(sizes), dtype=torch.int64, device=device)
        if fed_tokens
        else torch.zeros(shape, dtype=dtype, device=device),
        torch.zeros(shape, dtype=dtype, device=device),
        table,
        attention.pool.shape,
        attention.prepare,
        partial(CudaRecorder, device),
    )

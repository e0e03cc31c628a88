"""What a rank tells its frontend about itself."""

from typing import Literal, cast

from drumline.contract.specs import DeviceSpecs
from drumline.core.config import Config
from drumline.core.version import VERSION
from drumline.wire.handshake import Registration, declared_layouts


def registration_of(
    specs: DeviceSpecs, config: Config, max_request_tokens: int, data_index: int = 0
) -> Registration:
    """Return the registration of the replica `data_index`.

    `max_request_tokens` is the longest request, answer included, that the KV pool holds
    when it runs alone.
    """
    return Registration(
        max_model_len=specs.model.max_model_len,
        num_gpu_blocks=specs.num_pages - 1,
        prefix_granularity=specs.prefix_granularity,
        dtype=cast("Literal['float16', 'bfloat16', 'float32']", specs.model.dtype),
        vllm_version=f"tokenspeed-{VERSION}",
        world_size=config.parallel.world_size,
        data_parallel_size=config.parallel.data_parallel_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        data_parallel_rank=data_index,
        max_num_seqs=specs.max_rows,
        max_num_batched_tokens=config.schedule.chunked_prefill_size,
        instance_id=specs.model.name,
        kv_cache_size_tokens=max_request_tokens,
        request_types=["add", "abort", "control"],
        positional_layouts=declared_layouts(),
        device=specs.device,
        device_backend=specs.backend,
        kv_cache_dtype=specs.kv_dtype,
    )

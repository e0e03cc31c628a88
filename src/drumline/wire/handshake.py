"""How an engine and a frontend find each other: HELLO, INIT, READY and the registration.

An engine dials the frontend's handshake socket under its identity and says HELLO.
INIT tells it where to take requests from and where to put outputs. It says READY,
dials those, and registers: what it serves, and the order of its positional fields.
"""

from collections.abc import Callable
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from drumline.wire.codec import Buffer, MalformedFrameError, converted, decode_any, decoder
from drumline.wire.output import BatchTokenIDOutSlim, ControlReplySlim
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams

IDENTITY_BYTES = 2
MAX_ENGINES = 1 << (8 * IDENTITY_BYTES)


def identity_of(engine_index: int) -> bytes:
    """Return the socket identity of an engine: its index, little-endian."""
    return engine_index.to_bytes(IDENTITY_BYTES, "little")


def engine_of(identity: Buffer) -> int:
    """Return the index of the engine with this identity. Raises MalformedFrameError."""
    if len(identity) != IDENTITY_BYTES:
        raise MalformedFrameError(f"an engine's identity has 2 bytes, {len(identity)} came")
    return int.from_bytes(identity, "little")


class Greeting(Struct, kw_only=True):
    """HELLO and READY, by `status`. `engine_count` is the size of the engine's group, if said."""

    status: Literal["HELLO", "READY"]
    local: bool = True
    headless: bool = True
    parallel_config_hash: str | None = None
    engine_count: int | UnsetType = UNSET


class Addresses(Struct, kw_only=True):
    """Where an engine connects its sockets."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class Init(Struct, kw_only=True):
    """The frontend's answer to HELLO."""

    addresses: Addresses
    parallel_config: dict[str, Any] = {}


class KVEventsConfig(Struct, kw_only=True):
    """Where an engine publishes what enters and leaves its prefix cache."""

    enable_kv_cache_events: bool
    publisher: str
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int
    max_queue_size: int
    topic: str


def declared_layouts() -> dict[str, list[str]]:
    """Return the field order of the positional structs that this room sends."""
    return {
        kind.__name__: list(kind.__struct_fields__)
        for kind in (
            TokenizedGenerateReqInput,
            SamplingParams,
            BatchTokenIDOutSlim,
            ControlReplySlim,
        )
    }


class Registration(Struct, kw_only=True):
    """What an engine serves; its first message on the input socket.

    `num_gpu_blocks` are device pages; `prefix_granularity` tokens are the smallest
    prefix that requests share. `dtype` is `float16`, `bfloat16` or `float32`. The last three keys
    are drumline's own, for `/server_info`; others read over them.
    """

    max_model_len: int
    num_gpu_blocks: int
    prefix_granularity: int
    dp_stats_address: str | None = None
    dtype: Literal["float16", "bfloat16", "float32"]
    multimodal_encoder_dtype: str | None = None
    vllm_version: str = ""
    world_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = -1
    instance_id: str = ""
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: KVEventsConfig | None = None
    request_types: list[str] = []
    positional_layouts: dict[str, list[str]] = {}
    tensor_aux_frames: bool = False
    disaggregation_mode: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    mrope_positions: bool = False
    spatial_merge_size: int | None = None
    image_token_id: int | None = None
    video_token_id: int | None = None
    cache_trace_epochs: list[Any] = []
    device_backend: str | None = None
    kv_cache_dtype: str | None = None
    device: str | None = None


decode_greeting: Callable[[Buffer], Greeting] = decoder(Greeting)
decode_init: Callable[[Buffer], Init] = decoder(Init)


def decode_registration(data: Buffer) -> Registration:
    """Return an engine's registration; `block_size` may stand for `prefix_granularity`.

    Raises MalformedFrameError.
    """
    fields = decode_any(data)
    if isinstance(fields, dict) and "prefix_granularity" not in fields and "block_size" in fields:
        fields["prefix_granularity"] = fields["block_size"]
    registration: Registration = converted(fields, Registration)
    return registration

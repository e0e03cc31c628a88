"""What an operator may choose, in one tree of structs; flags are derived from it.

A field is a flag: `max_model_len` is `--max-model-len`. Its other spellings stand
in the field's `extra`, under `flags`, so that the users of other engines find
what they know. What is computed from these choices (pool sizes, limits) is not
here: see `contract.specs`.

Structs check their limits when they are converted (`msgspec.convert`), not when
they are constructed.
"""

from msgspec import Struct

from drumline.core.config.cache import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_KV_CACHE_SIZE,
    DEFAULT_KVSTORE_RATIO,
    CacheConfig,
    KvCacheDtype,
    WritePolicy,
)
from drumline.core.config.fields import parse_bytes, tcp
from drumline.core.config.grammar import GrammarBackend, GrammarConfig
from drumline.core.config.graph import DEFAULT_MOST_GRAPH_ROWS, GraphConfig
from drumline.core.config.model import Dtype, ModelConfig, Quantization, WeightUpdatePolicy
from drumline.core.config.parallel import DistributedBackend, LoadBalance, ParallelConfig
from drumline.core.config.process import DeviceChecks, LogLevel, ProcessConfig
from drumline.core.config.schedule import Role, ScheduleConfig, SchedulingPolicy
from drumline.core.config.serving import (
    ChatConfig,
    FrontendConfig,
    Gateway,
    ReasoningParser,
    ServerConfig,
    ToolCallParser,
)
from drumline.core.errors import ConfigError

__all__ = [
    "DEFAULT_GPU_MEMORY_UTILIZATION",
    "DEFAULT_KVSTORE_RATIO",
    "DEFAULT_KV_CACHE_SIZE",
    "DEFAULT_MOST_GRAPH_ROWS",
    "CacheConfig",
    "ChatConfig",
    "Config",
    "DeviceChecks",
    "DistributedBackend",
    "Dtype",
    "FrontendConfig",
    "Gateway",
    "GrammarBackend",
    "GrammarConfig",
    "GraphConfig",
    "KvCacheDtype",
    "LoadBalance",
    "LogLevel",
    "ModelConfig",
    "ParallelConfig",
    "ProcessConfig",
    "Quantization",
    "ReasoningParser",
    "Role",
    "ScheduleConfig",
    "SchedulingPolicy",
    "ServerConfig",
    "ToolCallParser",
    "WeightUpdatePolicy",
    "WritePolicy",
    "parse_bytes",
    "tcp",
]

_MOST_ENGINES = 1 << 16  # two bytes name an engine on the wire


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may choose."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    graph: GraphConfig = GraphConfig()
    grammar: GrammarConfig = GrammarConfig()
    chat: ChatConfig = ChatConfig()
    server: ServerConfig = ServerConfig()
    frontend: FrontendConfig = FrontendConfig()
    process: ProcessConfig = ProcessConfig()

    @property
    def in_flight_depth(self) -> int:
        """Forwards dispatched ahead of their commit; a performance knob only.

        A pipeline has one for each stage, whatever was said of overlapping.
        """
        stages = self.parallel.pipeline_parallel_size
        return int(self.schedule.overlap_schedule) if stages == 1 else stages

    def __post_init__(self) -> None:
        first, ranks = self.frontend.zmq_engine_index, self.parallel.data_parallel_size
        if first + ranks > _MOST_ENGINES:
            raise ConfigError(
                "--zmq-engine-index",
                f"{ranks} data-parallel ranks from {first} on pass the last number, "
                f"{_MOST_ENGINES - 1}",
            )

"""What an operator may choose, in one tree of structs; flags are derived from it.

A field is a flag: `max_model_len` is `--max-model-len`. Its other spellings stand
in the field's `extra`, under `flags`, so that the users of other engines find
what they know. What is computed from these choices (pool sizes, limits) is not
here: see `contract.specs`.

Structs check their limits when they are converted (`msgspec.convert`), not when
they are constructed.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from drumline.core.errors import ConfigError

Port = Annotated[int, Meta(ge=0, le=65535)]
# Counts fit the arrays they are computed with, and seconds a message: JSON has no infinity.
Positive = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
NotNegative = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Rows = Annotated[int, Meta(ge=1, le=65536)]
ContextTokens = Annotated[int, Meta(ge=2, le=(1 << 31) - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
ModelName = Annotated[str, Meta(min_length=1)]
Key = Annotated[str, Meta(min_length=1)]
Gigabytes = Annotated[float, Meta(ge=0, le=1e9)]
_MOST_ENGINES = 1 << 16  # two bytes name an engine on the wire
Share = Annotated[float, Meta(gt=0.0, le=1.0)]


def _flags(*names: str) -> dict[str, list[str]]:
    return {"flags": list(names)}


_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(setting: str, text: str, unit: str = "") -> int:
    """Return the bytes that `text` (`2GiB`, `512 MiB`, `1000000`) names.

    A bare number counts `unit`s. Raises ConfigError naming `setting` when it names none.
    """
    stripped = text.strip()
    digits = stripped.rstrip("KMGiBkmgb ")
    unit = stripped[len(digits) :].strip().lower() or unit
    try:
        size = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(setting, f"{text!r} is no size; write it as 2GiB or 512MiB") from None
    if size <= 0:
        raise ConfigError(setting, f"{text!r} is no size above zero")
    return size


def tcp(host: str, port: int | str) -> str:
    """Return a host and port as one address: `tcp://127.0.0.1:30500`, `tcp://[::1]:30500`."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


class Dtype(StrEnum):
    """What weights and activations are computed in."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Quantization(StrEnum):
    """Whether weights that a checkpoint stores as small integers are computed as such."""

    AUTO = "auto"
    """Where there are kernels for it, unless --dtype names a float type for them."""
    GGUF = "gguf"
    """Always: what cannot be is refused."""
    NONE = "none"
    """Never: they become floats of --dtype as they are read."""


class LogLevel(StrEnum):
    """How much a process says."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ToolCallParser(StrEnum):
    """How a model writes its calls of tools, under the names that other engines have for it."""

    AUTO = "auto"
    NONE = "none"
    HERMES = "hermes"
    QWEN = "qwen"
    QWEN25 = "qwen25"
    LLAMA3 = "llama3"
    LLAMA3_JSON = "llama3_json"
    JSON = "json"
    MISTRAL = "mistral"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    QWEN3_CODER = "qwen3_coder"


class ReasoningParser(StrEnum):
    """How a model sets off its reasoning, under the names that other engines have for it."""

    AUTO = "auto"
    NONE = "none"
    THINK = "think"
    QWEN3 = "qwen3"
    DEEPSEEK_R1 = "deepseek_r1"


class SchedulingPolicy(StrEnum):
    """In which order waiting requests are admitted."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class Role(StrEnum):
    """Which part of a request's way an engine takes."""

    PLAIN = "plain"
    """All of it."""
    PREFILL = "prefill"
    """Prompts, whose cache a decode engine takes over."""
    DECODE = "decode"
    """Answers, to prompts whose cache a prefill engine sends."""


class WritePolicy(StrEnum):
    """When pages are written to the host cache."""

    WRITE_THROUGH = "write_through"
    WRITE_BACK = "write_back"


class WeightUpdatePolicy(StrEnum):
    """What becomes of the weights that serve while others are loaded."""

    OFFLOAD = "offload"
    """They are kept until the others are there, and serve on if those never are."""
    DISCARD = "discard"
    """They are given up before, which saves their memory; without the others nothing serves."""


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how it is computed."""

    model: Annotated[
        str | None,
        Meta(
            description="a directory with safetensors, a GGUF file or a hub id; "
            "without it the embedded SmolLM2-135M-Instruct is served",
            extra=_flags("--model-path"),
        ),
    ] = None
    served_model_name: Annotated[
        tuple[ModelName, ...],
        Meta(description="names clients may use; the first is the one reported"),
    ] = ()
    dtype: Annotated[
        Dtype,
        Meta(
            description="auto follows the checkpoint where the device computes it natively, "
            "else float32"
        ),
    ] = Dtype.AUTO
    quantization: Annotated[
        Quantization,
        Meta(
            description="auto computes the 4- and 8-bit weights of GGUF files as they are, where "
            "the processor has AVX2 and --dtype is auto; none turns them into floats of --dtype; "
            "gguf refuses to start where they would be",
            extra=_flags("-q"),
        ),
    ] = Quantization.AUTO
    max_model_len: Annotated[
        ContextTokens | None,
        Meta(
            description="longest prompt plus answer, in tokens; the model's own by default",
            extra=_flags("--context-length"),
        ),
    ] = None
    seed: Annotated[
        int | None,
        Meta(
            description="seed of requests that name none; else each draws its own",
            extra=_flags("--random-seed"),
        ),
    ] = None
    deterministic: Annotated[
        bool,
        Meta(
            description="answer a request with the same tokens whatever runs beside it, however "
            "its prompt is cut and whatever is cached of it; slower",
            extra=_flags("--enable-deterministic-inference"),
        ),
    ] = False
    logits_processors: Annotated[
        tuple[ModelName, ...],
        Meta(
            description="installed logits processors that requests may name: entry points of the "
            "group drumline.logits_processors"
        ),
    ] = ()
    weight_version: Annotated[
        ModelName,
        Meta(description="what answers call the weights that are loaded at start"),
    ] = "default"
    weight_update_policy: Annotated[
        WeightUpdatePolicy,
        Meta(
            description="whether weights that serve are kept until an update of them is complete; "
            "discard writes over them, and blocks the engine until its restart if that fails"
        ),
    ] = WeightUpdatePolicy.OFFLOAD
    weight_update_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=86400)],
        Meta(
            description="seconds that a trainer's group may take to meet, or to send one tensor, "
            "for which the engine waits"
        ),
    ] = 60.0


DEFAULT_KVSTORE_RATIO = 2.0


class CacheConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much KV memory there is, and how it is shared."""

    kv_cache_size: Annotated[
        str,
        Meta(
            description="memory for KV pages, such as 2GiB or 512MiB",
            extra=_flags("--kv-cache-memory-bytes"),
        ),
    ] = "2GiB"
    gpu_memory_utilization: Annotated[
        Share | None,
        Meta(
            description="share of the device's memory (on a CPU, of the available memory) "
            "to use in place of --kv-cache-size",
            extra=_flags("--mem-fraction-static"),
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
            extra=_flags("--block-size", "--page-size"),
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
            description="keep prefix pages in host memory once they leave the KV pool; on a CPU, "
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
            extra=_flags("--hicache-size", "--kv-offloading-size"),
        ),
    ] = None
    kvstore_ratio: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        Meta(
            description="host cache as a multiple of the KV pool, where --kvstore-size is not "
            f"set; {DEFAULT_KVSTORE_RATIO} by default",
            extra=_flags("--hicache-ratio"),
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
            "As large as the KV pool by default, at most a quarter of the memory left beside it",
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


class ScheduleConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a round may hold."""

    max_num_seqs: Annotated[
        Rows,
        Meta(
            description="requests that run at the same time",
            extra=_flags("--max-running-requests"),
        ),
    ] = 160
    chunked_prefill_size: Annotated[
        Positive,
        Meta(
            description="tokens a round may compute; longer prompts are cut into chunks",
            extra=_flags("--max-num-batched-tokens"),
        ),
    ] = 2048
    overlap_schedule: Annotated[
        bool,
        Meta(
            description="plan a round while the forward before it still runs",
            extra={
                "off": ["--disable-overlap-schedule", "--no-async-scheduling"],
            },
        ),
    ] = True
    mixed_batch: Annotated[
        bool,
        Meta(
            description="let prefill and decode rows share a batch",
            extra={
                "flags": ["--enable-mixed-batch", "--enable-mixed-chunk"],
                "off": ["--disable-mixed-batch"],
            },
        ),
    ] = True
    mixed_prefill_tokens: Annotated[
        Positive | None,
        Meta(
            description="prompt tokens that a batch may compute beside decodes, so that long "
            "prompts slow answers by a bounded time only; what --chunked-prefill-size leaves by "
            "default",
        ),
    ] = None
    scheduling_policy: Annotated[
        SchedulingPolicy,
        Meta(
            description="order in which waiting requests are admitted: as they came, or those of "
            "higher priority first",
            extra=_flags("--schedule-policy"),
        ),
    ] = SchedulingPolicy.FCFS
    scheduling_patience: Annotated[
        NotNegative,
        Meta(
            description="plans that may admit later requests before a waiting one; then it goes "
            "first, and nobody before it; 0 is any number",
        ),
    ] = 0
    max_num_queued_reqs: Annotated[
        Positive | None,
        Meta(
            description="requests a rank lets wait beyond those it has free rows for; more are "
            "answered 429; any number by default",
            extra=_flags("--max-queued-requests"),
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        Positive | None,
        Meta(
            description="prompt tokens a rank lets wait, a single request's always; more are "
            "answered 429; any number by default",
        ),
    ] = None

    @property
    def in_flight_depth(self) -> int:
        """Forwards dispatched ahead of their commit; a performance knob only."""
        return int(self.overlap_schedule)


class LoadBalance(StrEnum):
    """How requests are spread over data-parallel ranks."""

    ROUND_ROBIN = "round_robin"
    SHORTEST_QUEUE = "shortest_queue"
    MINIMUM_CACHE_USAGE = "minimum_cache_usage"
    PREFIX_AWARE = "prefix_aware"


class DistributedBackend(StrEnum):
    """Who starts the ranks of other machines than the first."""

    MP = "mp"
    """The operator: the same command on each."""
    RAY = "ray"
    """A Ray cluster."""


class ParallelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many ranks serve the model, and how they share the work."""

    tensor_parallel_size: Annotated[
        Positive,
        Meta(
            description="ranks that compute one forward together, each with a part of the weights",
            extra=_flags("--tp", "--tp-size", "--attn-tp-size", "-tp"),
        ),
    ] = 1
    data_parallel_size: Annotated[
        Positive,
        Meta(
            description="copies of the model that take requests in turn, in step with each other",
            extra=_flags("--dp", "--dp-size", "-dp"),
        ),
    ] = 1
    load_balance_method: Annotated[
        LoadBalance,
        Meta(description="which data-parallel rank takes a request that names none"),
    ] = LoadBalance.SHORTEST_QUEUE
    nprocs_per_node: Annotated[
        Positive | None,
        Meta(description="ranks on each machine; all of them by default, shared out evenly"),
    ] = None
    nnodes: Annotated[
        Positive | None,
        Meta(
            description="machines that the ranks are spread over, each of which runs this command; "
            "those of the Slurm step by default, else 1"
        ),
    ] = None
    node_rank: Annotated[
        NotNegative | None,
        Meta(
            description="which of the machines this is, from 0; the first one serves, the others "
            "run ranks only"
        ),
    ] = None
    dist_init_addr: Annotated[
        str | None,
        Meta(
            description="host:port of the first machine, where rank 0 meets the others; the same "
            "on every machine; a free port of 127.0.0.1 by default"
        ),
    ] = None
    distributed_backend: Annotated[
        DistributedBackend,
        Meta(
            description="who starts the ranks of other machines: the same command on each (mp), or "
            "a Ray cluster that this machine belongs to",
            extra=_flags("--distributed-executor-backend"),
        ),
    ] = DistributedBackend.MP
    dist_secret_file: Annotated[
        str | None,
        Meta(
            description="a file with a secret that ranks of several machines show each other, the "
            "same on every machine"
        ),
    ] = None
    peer_timeout: Annotated[
        Seconds,
        Meta(
            description="seconds of silence after which another rank is given up and the engine "
            "ends; 0 only reports it and waits",
        ),
    ] = 5.0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def nodes(self) -> int:
        """How many machines there are."""
        return self.nnodes or 1

    @property
    def node(self) -> int:
        """Which of them this is."""
        return self.node_rank or 0

    @property
    def local_ranks(self) -> int:
        """How many ranks run on each machine."""
        return self.nprocs_per_node or self.world_size // self.nodes


class GrammarBackend(StrEnum):
    """Which library constrains answers to grammars."""

    XGRAMMAR = "xgrammar"
    LLGUIDANCE = "llguidance"
    NONE = "none"


class GrammarConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How answers are held to grammars."""

    grammar_backend: Annotated[
        GrammarBackend,
        Meta(
            description="library that compiles grammars; none refuses requests that have one",
            extra=_flags("--guided-decoding-backend"),
        ),
    ] = GrammarBackend.XGRAMMAR
    grammar_compile_timeout: Annotated[
        float,
        Meta(gt=0, description="seconds that compiling one grammar may take"),
    ] = 10.0
    grammar_queue_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds that a grammar may wait for others' compiles; its requests "
            "are refused with status 503 then",
        ),
    ] = 60.0
    grammar_workers: Annotated[
        Positive,
        Meta(description="grammars that are compiled at the same time"),
    ] = 1
    grammar_cache_size: Annotated[
        Positive,
        Meta(description="compiled grammars that are kept for requests to come"),
    ] = 256


class ChatConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How conversations become prompts."""

    chat_template: Annotated[
        str | None,
        Meta(
            description="a file with a Jinja chat template, or the template itself; the "
            "checkpoint's own by default"
        ),
    ] = None
    tool_call_parser: Annotated[
        ToolCallParser,
        Meta(
            description="how the model writes its calls of tools; auto follows the chat template, "
            "none leaves them in the text"
        ),
    ] = ToolCallParser.AUTO
    reasoning_parser: Annotated[
        ReasoningParser,
        Meta(
            description="whether the model reasons between <think> and </think>; auto follows the "
            "chat template, none leaves it in the text"
        ),
    ] = ReasoningParser.AUTO


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the HTTP server is reached, and what it takes in."""

    host: Annotated[str, Meta(description="address to bind")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port to bind; 0 takes a free one")] = 8000
    api_server_count: Annotated[
        Annotated[int, Meta(ge=1, le=64)],
        Meta(
            description="HTTP workers behind the port, processes that speak HTTP and text; with "
            "one, that is the launcher itself",
            extra=_flags("--tokenizer-worker-num"),
        ),
    ] = 1
    max_body_bytes: Annotated[Positive, Meta(description="largest request body that is read")] = (
        32 * 1024 * 1024
    )
    max_concurrent_streams: Annotated[
        Positive | None,
        Meta(
            description="requests for text that are answered at the same time; more get 429; any "
            "number by default",
            extra=_flags("--max-concurrent-requests"),
        ),
    ] = None
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=1e9)] | None,
        Meta(
            description="seconds that a request for text may take, from its first byte to its "
            "answer's last; then it ends with 408; any time by default",
        ),
    ] = None
    unread_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)],
        Meta(
            description="seconds after which a client that reads nothing of its answer is hung up "
            "on, and its request ended",
        ),
    ] = 60.0
    api_key: Annotated[
        tuple[Key, ...],
        Meta(
            description="keys of clients, who send one as `Authorization: Bearer KEY`; without "
            "any, all are served"
        ),
    ] = ()
    api_key_file: Annotated[
        str | None, Meta(description="a file with further keys of clients, one a line")
    ] = None
    admin_api_key: Annotated[
        Key | None,
        Meta(
            description="the key of control routes, which opens all others too; by default a "
            "client's opens those",
            extra=_flags("--rl-control-api-key"),
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="web origins whose pages may call this server, such as https://a.example; "
            "* is any; none by default",
            extra=_flags("--cors-allowed-origins"),
        ),
    ] = ()
    ssl_keyfile: Annotated[
        str | None, Meta(description="the private key of --ssl-certfile, in PEM")
    ] = None
    ssl_certfile: Annotated[
        str | None,
        Meta(description="a certificate with its chain, in PEM, with which HTTPS is spoken"),
    ] = None

    def __post_init__(self) -> None:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile", "has no effect without --ssl-certfile")

    @property
    def secrets(self) -> frozenset[str]:
        """The fields that are shown to nobody."""
        return frozenset({"api_key", "admin_api_key"})


class Gateway(StrEnum):
    """A frontend of somebody else's that `drumline serve` starts, too."""

    SMG = "smg"


class FrontendConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose frontend the ranks serve, where it does not start with them."""

    headless: Annotated[
        bool,
        Meta(
            description="start ranks only; they dial the handshake of a frontend of somebody "
            "else's, and end with it"
        ),
    ] = False
    data_parallel_address: Annotated[
        str, Meta(description="with --headless, the host of the frontend's handshake")
    ] = "127.0.0.1"
    data_parallel_rpc_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)],
        Meta(description="with --headless, the port of the frontend's handshake"),
    ] = 30500
    zmq_engine_index: Annotated[
        Port,
        Meta(
            description="with --headless, the number under which the first data-parallel rank "
            "registers; the others count on from it"
        ),
    ] = 0

    gateway: Annotated[
        Gateway | None,
        Meta(
            description="answer HTTP with this gateway, which is installed beside drumline, in "
            "place of drumline's own server"
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.headless and self.gateway is not None:
            raise ConfigError("--gateway", "starts a frontend, and --headless says there is one")

    @property
    def handshake(self) -> str:
        """The address that headless ranks dial."""
        return tcp(self.data_parallel_address, self.data_parallel_rpc_port)


class ProcessConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine's processes start, stop and speak."""

    drain_timeout: Annotated[
        Seconds,
        Meta(
            description="seconds that running requests get to finish on shutdown",
            extra=_flags("--shutdown-timeout"),
        ),
    ] = 30.0
    startup_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=1e9,
            description="seconds until an engine that is not ready counts as failed",
            extra=_flags("--engine-startup-timeout"),
        ),
    ] = 3600.0
    log_level: Annotated[
        LogLevel | None,
        Meta(description="how much is logged; info for a server, else warning"),
    ] = None
    profile_dir: Annotated[
        str | None,
        Meta(
            description="directory inside of which profiles are written; that for temporary files "
            "by default",
            extra=_flags("--profiler-dir"),
        ),
    ] = None


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may choose."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    grammar: GrammarConfig = GrammarConfig()
    chat: ChatConfig = ChatConfig()
    server: ServerConfig = ServerConfig()
    frontend: FrontendConfig = FrontendConfig()
    process: ProcessConfig = ProcessConfig()

    def __post_init__(self) -> None:
        first, ranks = self.frontend.zmq_engine_index, self.parallel.data_parallel_size
        if first + ranks > _MOST_ENGINES:
            raise ConfigError(
                "--zmq-engine-index",
                f"{ranks} data-parallel ranks from {first} on pass the last number, "
                f"{_MOST_ENGINES - 1}",
            )

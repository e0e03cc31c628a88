"""What clients reach: chats, the HTTP server, and frontends of somebody else's."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from drumline.core.config.fields import Key, Port, Positive, flags, tcp
from drumline.core.errors import ConfigError


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

    @classmethod
    def _missing_(cls, value: object) -> "ReasoningParser | None":
        return cls.DEEPSEEK_R1 if value == "deepseek-r1" else None


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
            extra=flags("--tokenizer-worker-num"),
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
            extra=flags("--max-concurrent-requests"),
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
            extra=flags("--rl-control-api-key"),
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="web origins whose pages may call this server, such as https://a.example; "
            "* is any; none by default",
            extra=flags("--cors-allowed-origins"),
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

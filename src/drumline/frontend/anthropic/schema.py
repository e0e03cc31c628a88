"""The bodies of Anthropic's messages API. What is no field here is judged by `parameters`."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class InputBlock(Struct, kw_only=True):
    """One block of a message's content; which fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[InputBlock] | None" = None


class InputMessage(Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[InputBlock]


class InputTool(Struct, kw_only=True):
    """A tool that the model may use."""

    name: str
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Struct, kw_only=True):
    """What an answer must do with the tools."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """Whether the model reasons before it answers."""

    type: str
    budget_tokens: int | None = None


class CountRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[InputBlock] | None = None
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class TextBlock(Struct):
    """Text of an answer."""

    text: str
    type: str = "text"


class ThinkingBlock(Struct):
    """What the model thought before it answered."""

    thinking: str
    signature: str = ""
    type: str = "thinking"


class ToolUseBlock(Struct):
    """A call of a tool."""

    id: str
    name: str
    input: Any
    type: str = "tool_use"


class Usage(Struct):
    """What a request cost, in tokens; those of its prompt that were cached stand apart."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageBody(Struct):
    """A whole answer; also how a stream begins."""

    id: str
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    usage: Usage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"
    weight_version: str | UnsetType = UNSET
    """What the weights are called that made it, once it is complete."""


class Delta(Struct, kw_only=True, omit_defaults=True):
    """What a block grows by; one of the fields beside its type."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET


class StopDelta(Struct):
    """Why an answer ended."""

    stop_reason: str | None
    stop_sequence: str | None


class Event(Struct, kw_only=True, omit_defaults=True):
    """One event of a streamed answer; which fields it has depends on its type."""

    type: str | UnsetType = UNSET
    message: MessageBody | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: TextBlock | ThinkingBlock | ToolUseBlock | UnsetType = UNSET
    delta: Delta | StopDelta | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET


class Count(Struct):
    """The reply of count_tokens."""

    input_tokens: int

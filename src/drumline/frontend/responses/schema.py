"""The bodies of the responses API. What is no field here is judged by `request`'s tables."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class InputPart(Struct):
    """One part of an item's content."""

    type: str
    text: str | None = None


class InputItem(Struct, kw_only=True):
    """One item of the conversation; which fields it has depends on its type."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class FunctionTool(Struct, kw_only=True):
    """A tool that the model may use."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Struct, frozen=True, kw_only=True):
    """What an answer's text is held to."""

    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, frozen=True, kw_only=True):
    """How the text of an answer is to be."""

    format: TextFormat | None = None


class ReasoningOptions(Struct, frozen=True, kw_only=True):
    """How much a model reasons."""

    effort: str | None = None


class ResponsesRequest(Struct, kw_only=True):
    """POST /v1/responses."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None


class OutputText(Struct):
    """The text of a message."""

    text: str
    type: str = "output_text"
    annotations: list[None] = []


class ReasoningText(Struct):
    """The text of a model's reasoning."""

    text: str
    type: str = "reasoning_text"


class MessageItem(Struct):
    """A message of the assistant's."""

    id: str
    content: list[OutputText]
    status: str = "completed"
    type: str = "message"
    role: str = "assistant"


class ReasoningItem(Struct):
    """What the model thought before it answered."""

    id: str
    content: list[ReasoningText]
    status: str = "completed"
    summary: list[None] = []
    type: str = "reasoning"


class FunctionCallItem(Struct):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str = "completed"
    type: str = "function_call"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputDetails(Struct):
    """How much of the prompt was in the prefix cache."""

    cached_tokens: int


class OutputDetails(Struct):
    """What of an answer was reasoning; it is not counted by itself."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """What a request cost, in tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(Struct):
    """Why an answer is not complete."""

    reason: str


class ResponseBody(Struct, kw_only=True):
    """A response, complete or as far as it has come."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    store: bool = False
    temperature: float | None = None
    text: TextOptions = TextOptions()
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[FunctionTool] = []
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    weight_version: str | UnsetType = UNSET
    """What the weights are called that made it, once it is complete."""


class ResponseEvent(Struct, kw_only=True, omit_defaults=True):
    """One event of a stream; which fields it has depends on its type."""

    type: str | UnsetType = UNSET
    sequence_number: int | UnsetType = UNSET
    response: ResponseBody | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[None] | UnsetType = UNSET

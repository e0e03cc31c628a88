"""The bodies of OpenAI's API.

Requests: a field of the wrong type is refused, a null means the default; what is no field
here is judged by `openai.parameters`. Answers: fields in the published
order. The structs of requests share their sampling fields by extension, because
that is how the API nests.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType


class StreamOptions(Struct):
    """What a stream holds beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """What both generating routes take."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    data_parallel_rank: int | None = None
    priority: int | None = None
    rid: str | list[str] | None = None
    request_id: str | None = None
    typical_p: float | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    cache_salt: str | None = None
    logits_processors: dict[str, Any] | list[str] | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None


class ContentPart(Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(Struct):
    """What a call calls; its arguments are the text of a JSON object."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Struct):
    """A call of a tool, in an answer and in the messages that repeat it."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct):
    """A tool that the model may use."""

    type: str
    function: FunctionDefinition | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class PromptDetails(Struct):
    """How much of the prompts was in the prefix cache."""

    cached_tokens: int


class UsageBody(Struct):
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(Struct):
    """One token that could have been drawn."""

    token: str
    logprob: float
    bytes: list[int]


class Metadata(Struct):
    """Which weights an answer was computed with."""

    weight_version: str


class ChatLogprob(Struct):
    """The token that was drawn, and the likeliest at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """The log probabilities of a choice's tokens."""

    content: list[ChatLogprob]


class PromptLogprob(Struct):
    """A token at a place of the prompt; its rank is known where it is among the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By id, the token at each place and the likeliest there; None at the first place."""


class AssistantMessage(Struct):
    """A whole answer."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One of a chat request's answers."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatBody(Struct):
    """The whole reply to a chat request."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: str = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class FunctionDelta(Struct):
    """What a chunk adds to a call's function; the name comes once."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """What a chunk adds to a call; all but the first have its index and arguments alone."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(Struct):
    """What a chunk adds to an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A chunk's part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """One event of a streamed chat reply."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    metadata: Metadata | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """The log probabilities of a choice's tokens, a column each."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    """One of a completion request's answers, or a chunk's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class CompletionBody(Struct):
    """The reply to a completion request; also one event of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    object: str = "text_completion"
    metadata: Metadata | UnsetType = UNSET


class ModelBody(Struct):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "drumline"


class ModelList(Struct):
    """GET /v1/models."""

    data: list[ModelBody]
    object: str = "list"

"""A request of the responses API as a chat request.

Messages, calls and what they returned are items of one list there; calls that stand behind
each other are one message of a chat. Nothing is stored, so a request holds its conversation.
"""

from collections.abc import Sequence
from typing import Any

from drumline.core.errors import RequestError, quoted
from drumline.frontend.openai.parameters import IGNORED, Refused, Rest
from drumline.frontend.openai.parameters import REFUSED as PARAMETERS
from drumline.frontend.openai.schema import (
    CalledFunction,
    ChatRequest,
    FunctionDefinition,
    Message,
    ToolCall,
    ToolDefinition,
)
from drumline.frontend.responses.schema import (
    FunctionTool,
    InputItem,
    InputPart,
    ResponsesRequest,
    TextFormat,
)

_STORED = "nothing is stored here; send the whole conversation as input"

_REFUSED = {
    "previous_response_id": Refused(_STORED),
    "conversation": Refused(_STORED),
    "background": Refused("nothing is stored here that could be fetched later"),
    "prompt": Refused("no prompts are stored here; write it into instructions and input"),
    "top_logprobs": Refused("use /v1/chat/completions, which reports log probabilities", (0,)),
    "truncation": PARAMETERS["truncation"],
    "max_tool_calls": Refused("the server runs no tools of its own"),
}
"""What could change the answer and is not to be had."""

_IGNORED = {
    "include": "nothing is kept that could be included",
    "stream_options": "events are not padded",
    **{
        name: IGNORED[name]
        for name in (
            "user",
            "safety_identifier",
            "service_tier",
            "prompt_cache_key",
            "prompt_cache_retention",
        )
    },
}
"""What cannot change the answer."""

REST = Rest(_REFUSED, _IGNORED)

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Return `request` as a chat. Raises RequestError 400 naming what cannot be had."""
    length = request.max_output_tokens
    if length is not None and length < 1:
        raise _refused("max_output_tokens", f"is {length}; it must be at least 1")
    format_ = request.text.format if request.text else None
    return ChatRequest(
        model=request.model,
        messages=_conversation(request),
        max_tokens=length,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(request.tools or ())],
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=None if format_ is None else _format(format_),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
    )


def _conversation(request: ResponsesRequest) -> list[Message]:
    messages = [Message("system", request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, Message("user", request.input)]
    if not request.input:
        raise _refused("input", "is empty; at least one item is needed")
    thought = ""
    for index, item in enumerate(request.input):
        where = f"input[{index}]"
        if item.type == "reasoning":
            thought = _text(f"{where}.content", item.content or item.summary or "")
            continue
        if item.type == "function_call":
            _add_call(messages, where, item, thought)
        else:
            messages.append(_message(where, item, thought))
        thought = ""
    return messages


def _message(name: str, item: InputItem, thought: str) -> Message:
    match item.type:
        case "message":
            if item.role is None:
                raise _refused(f"{name}.role", "is missing")
            if item.content is None:
                raise _refused(f"{name}.content", "is missing")
            text = _text(f"{name}.content", item.content)
            return Message(item.role, text, reasoning_content=thought or None)
        case "function_call_output":
            return Message(
                "tool", _text(f"{name}.output", item.output or ""), tool_call_id=item.call_id
            )
    raise _refused(
        f"{name}.type",
        f"is {quoted(item.type)}; message, reasoning, function_call and function_call_output are "
        "known",
    )


def _add_call(messages: list[Message], name: str, item: InputItem, thought: str) -> None:
    if item.name is None:
        raise _refused(f"{name}.name", "is missing")
    call = ToolCall(CalledFunction(item.name, item.arguments or "{}"), item.call_id)
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        last = Message("assistant", "", reasoning_content=thought or None)
        messages.append(last)
    last.tool_calls = [*(last.tool_calls or ()), call]


def _text(name: str, content: str | Sequence[InputPart]) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in _TEXTS:
            raise _refused(
                f"{name}[{index}].type", f"is {quoted(part.type)}; this model takes text only"
            )
        if part.text is None:
            raise _refused(f"{name}[{index}].text", "is missing")
    return "\n".join(part.text or "" for part in content)


def _tool(name: str, tool: FunctionTool) -> ToolDefinition:
    if tool.type != "function":
        raise _refused(
            f"{name}.type",
            f"is {quoted(tool.type)}; tools of the server's own are not run, 'function' is",
        )
    if tool.name is None:
        raise _refused(f"{name}.name", "is missing")
    function = FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict)
    return ToolDefinition("function", function)


def _format(format_: TextFormat) -> dict[str, Any] | None:
    if format_.type == "json_schema":
        if format_.schema is None:
            raise _refused("text.format.schema", "is missing")
        return {"type": "json_schema", "json_schema": {"schema": format_.schema}}
    return {"type": format_.type}


def _refused(param: str, why: str) -> RequestError:
    return RequestError(400, f"{param}: {why}", param=param, code="invalid_value")

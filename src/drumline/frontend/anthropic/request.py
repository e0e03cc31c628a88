"""A request of the messages API as a chat request.

What a user says and what tools returned stand in one message there, and in several in a chat.
A last message of the assistant's is one that its answer continues.
"""

from collections.abc import Sequence

import msgspec

from drumline.core.errors import RequestError, quoted
from drumline.frontend.anthropic.schema import (
    CountRequest,
    InputBlock,
    InputMessage,
    InputTool,
    MessagesRequest,
    ToolChoice,
)
from drumline.frontend.openai.parameters import Refused, Rest
from drumline.frontend.openai.schema import (
    CalledFunction,
    ChatRequest,
    FunctionDefinition,
    Message,
    ToolCall,
    ToolDefinition,
)

_REFUSED = {
    "mcp_servers": Refused("servers of tools are not called; send their tools as tools"),
    "container": Refused("code is not run"),
    "context_management": Refused("conversations are not edited; send what the model is to see"),
    "output_format": Refused("use a tool with tool_choice, or /v1/chat/completions"),
    "output_config": Refused("use a tool with tool_choice, or /v1/chat/completions"),
}
"""What could change the answer and is not to be had."""

_IGNORED = {
    "metadata": "nothing is stored",
    "service_tier": "there is one",
    "inference_geo": "there is one place",
    "cache_control": "prefixes are always cached",
    "betas": "there are none",
}
"""What cannot change the answer."""

REST = Rest(_REFUSED, _IGNORED)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def count_as_chat(request: CountRequest) -> ChatRequest:
    """Return the conversation of `request`. Raises RequestError 400 naming what no model takes."""
    messages = _system(request.system) if request.system else []
    for index, message in enumerate(request.messages):
        messages += _messages(f"messages[{index}]", message)
    if not request.messages:
        raise _refused("messages", "is empty; at least one message is needed")
    choice = request.tool_choice
    thinking = request.thinking
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(request.tools or ())],
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        continue_final_message=_continues(messages),
        chat_template_kwargs=(
            None if thinking is None else {"enable_thinking": thinking.type != "disabled"}
        ),
    )


def as_chat(request: MessagesRequest) -> ChatRequest:
    """Return `request` as a chat. Raises RequestError 400 naming what cannot be had."""
    if request.max_tokens < 1:
        raise _refused("max_tokens", f"is {request.max_tokens}; it must be at least 1")
    return msgspec.structs.replace(
        count_as_chat(request),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )


def _system(system: str | Sequence[InputBlock]) -> list[Message]:
    text = system if isinstance(system, str) else _texts("system", system)
    return [Message("system", text)]


def _messages(name: str, message: InputMessage) -> list[Message]:
    content = message.content
    if message.role not in {"user", "assistant"}:
        raise _refused(f"{name}.role", f"is {quoted(message.role)}; known roles: user, assistant")
    if isinstance(content, str):
        return [Message(message.role, content)]
    if message.role == "assistant":
        return [_assistant(name, content)]
    found: list[Message] = []
    said: list[InputBlock] = []
    for index, block in enumerate(content):
        where = f"{name}.content[{index}]"
        if block.type == "tool_result":
            found.append(_result(where, block))
        else:
            _check_text(where, block)
            said.append(block)
    if said or not found:
        found.append(Message("user", "\n".join(block.text or "" for block in said)))
    return found


def _assistant(name: str, content: Sequence[InputBlock]) -> Message:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(content):
        where = f"{name}.content[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # only who wrote it could read it
            case "tool_use":
                if block.name is None:
                    raise _refused(f"{where}.name", "is missing")
                function = CalledFunction(block.name, block.input or {})
                calls.append(ToolCall(function, block.id))
            case _:
                _check_text(where, block)
                texts.append(block.text or "")
    return Message(
        "assistant",
        "\n".join(texts),
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def _result(name: str, block: InputBlock) -> Message:
    content = block.content or ""
    text = content if isinstance(content, str) else _texts(f"{name}.content", content)
    return Message("tool", text, tool_call_id=block.tool_use_id)


def _texts(name: str, blocks: Sequence[InputBlock]) -> str:
    for index, block in enumerate(blocks):
        _check_text(f"{name}[{index}]", block)
    return "\n".join(block.text or "" for block in blocks)


def _check_text(name: str, block: InputBlock) -> None:
    if block.type != "text":
        raise _refused(
            f"{name}.type", f"is {quoted(block.type)}, which this model does not take here"
        )
    if block.text is None:
        raise _refused(f"{name}.text", "is missing")


def _continues(messages: Sequence[Message]) -> bool:
    last = messages[-1] if messages else None
    return last is not None and last.role == "assistant" and bool(last.content)


def _tool(name: str, tool: InputTool) -> ToolDefinition:
    if tool.type != "custom":
        raise _refused(
            f"{name}.type",
            f"is {quoted(tool.type)}; tools of the server's own are not run, 'custom' is",
        )
    return ToolDefinition(
        "function",
        FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict),
    )


def _choice(choice: ToolChoice) -> str | dict[str, object]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    known = _CHOICES.get(choice.type)
    if known is None:
        raise _refused(
            "tool_choice.type", f"is {quoted(choice.type)}; known: auto, any, tool, none"
        )
    return known


def _refused(param: str, why: str) -> RequestError:
    return RequestError(400, f"{param}: {why}", param=param, code="invalid_value")

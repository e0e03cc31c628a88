"""The messages of a request, brought into the form that chat templates take."""

from collections.abc import Sequence
from typing import Any

import msgspec

from drumline.core.errors import RequestError, quoted
from drumline.frontend.openai.schema import Message, ToolCall

MAX_MESSAGES = 4096
"""Templates are rendered on the event loop, where streams wait for it meanwhile."""

_ROLES = {
    "system": "system",
    "developer": "system",  # the newer name; templates know the older one
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them, every content one string.

    Raises RequestError 400 naming the first thing that no template could take.
    """
    if not messages:
        raise RequestError(
            400, "messages is empty; at least one message is needed", param="messages",
            code="empty_array",
        )  # fmt: skip
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            400, f"messages has {len(messages)} entries; {MAX_MESSAGES} are allowed",
            param="messages", code="array_above_max_length",
        )  # fmt: skip
    return [_template_message(f"messages[{index}]", turn) for index, turn in enumerate(messages)]


def _template_message(name: str, message: Message) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(
            400,
            f"{name}.role is {quoted(message.role)}; known roles: {', '.join(_ROLES)}",
            param=f"{name}.role",
            code="invalid_value",
        )
    calls = [
        _template_call(f"{name}.tool_calls[{index}].function.arguments", call)
        for index, call in enumerate(message.tool_calls or ())
    ]
    extras = {
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }
    return {
        "role": role,
        "content": _text(name, message),
        **{key: value for key, value in extras.items() if value is not None},
    }


def _template_call(name: str, call: ToolCall) -> dict[str, Any]:
    """Return a call with its arguments as an object; templates write them as JSON themselves."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise RequestError(
                400, f"{name} is the text of no JSON object: {error}", param=name,
                code="invalid_json",
            ) from None  # fmt: skip
    function = {"name": call.function.name, "arguments": arguments}
    own_id = {} if call.id is None else {"id": call.id}
    return {**own_id, "type": "function", "function": function}


def _text(name: str, message: Message) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise RequestError(
                400, f"{name}.content is missing", param=f"{name}.content",
                code="missing_required_parameter",
            )  # fmt: skip
        return ""
    texts = []
    for index, part in enumerate(content):
        where = f"{name}.content[{index}]"
        if part.type != "text":
            raise RequestError(
                400,
                f"{where}.type is {quoted(part.type)}; this model takes 'text' only",
                param=f"{where}.type",
                code="unsupported_content_part",
            )
        if part.text is None:
            raise RequestError(
                400, f"{where}.text is missing", param=f"{where}.text",
                code="missing_required_parameter",
            )  # fmt: skip
        texts.append(part.text)
    return "\n".join(texts)

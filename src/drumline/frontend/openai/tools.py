"""The tools of a request: what the model is told of them, and what its answer must do."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from drumline.client.tool_calls import CallFormat, Forced, Tool, call_grammar
from drumline.contract.grammar import GrammarKey
from drumline.core.errors import RequestError, quoted
from drumline.frontend.openai.schema import ChatRequest, ToolDefinition
from drumline.frontend.parts.form import AnswerForm

MAX_TOOLS = 128
_LONGEST_NAME = 64
_TAKES_ALL: dict[str, Any] = {"type": "object"}
_TAKES_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


class ToolUse(Struct, frozen=True, kw_only=True):
    """What one request's answers may call."""

    told: Sequence[dict[str, Any]] = ()
    """The tools as chat templates take them."""
    schemas: Mapping[str, Mapping[str, Any] | None] = {}
    """What those take that may be called, by their names."""
    format: CallFormat | None = None
    """How calls are written; None where there are none to look for."""
    most: int | None = None
    held: GrammarKey | None = None
    """What makes the answer call a tool, or holds the calls it makes."""
    forced: bool = False
    """Whether the answer must be a call from its first token on."""


def tool_use(request: ChatRequest, form: AnswerForm) -> ToolUse:
    """Return what the answers to `request` may call, of a model that answers in this `form`.

    Raises RequestError 400 naming what is malformed, or cannot be had of this model.
    """
    tools = request.tools or []
    choice = _choice(request.tool_choice, tools)
    if choice is None:
        return ToolUse()
    told = [_told(index, tool) for index, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in told]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _refused(
                f"tools[{index}].function.name", f"{quoted(name)} is the name of another tool"
            )
    parallel = request.parallel_tool_calls is not False
    most = None if parallel else 1
    if choice is Forced.AUTO:
        if not form.takes_tools:
            raise _refused(
                "tools",
                "the model's chat template tells it of no tools; see --chat-template, or make it "
                "call one with tool_choice",
                "tools_not_in_template",
            )
        if form.calls is None:
            raise _refused(
                "tools",
                "in what form this model calls tools is not known here; see --tool-call-parser",
                "tool_format_unknown",
            )
    format_ = form.calls or CallFormat.JSON
    strict = any(tool.function and tool.function.strict for tool in tools)
    held = None
    if choice is not Forced.AUTO or (strict and format_ is CallFormat.HERMES):
        loose = choice is Forced.AUTO
        schemas = [_schema(tool, loose=loose) for tool in tools]
        held = call_grammar(schemas, choice, format_, parallel=parallel)
    return ToolUse(
        told=told,
        schemas={tool["function"]["name"]: tool["function"]["parameters"] for tool in told},
        format=format_,
        most=most,
        held=held,
        forced=choice is not Forced.AUTO,
    )


def _choice(choice: Any, tools: Sequence[ToolDefinition]) -> Forced | str | None:
    """Return what an answer must do, perhaps the name of what it must call; None for no tools."""
    param = "tool_choice"
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if not isinstance(name, str):
            raise _refused(param, "function.name is missing; it names the tool to call")
        named: Forced | str = name
    elif choice is None or choice == "auto":
        return Forced.AUTO if tools else None
    elif choice == "none":
        return None
    elif choice == "required":
        named = Forced.REQUIRED
    else:
        raise _refused(
            param, "must be 'auto', 'none', 'required' or a tool, as "
            '{"type": "function", "function": {"name": …}}',
        )  # fmt: skip
    if not tools:
        raise _refused(param, "asks for a call, and tools is empty")
    return named


def _told(index: int, tool: ToolDefinition) -> dict[str, Any]:
    name = f"tools[{index}]"
    if index >= MAX_TOOLS:
        raise _refused("tools", f"there are more than {MAX_TOOLS}", "array_above_max_length")
    if tool.type != "function":
        raise _refused(f"{name}.type", f"{quoted(tool.type)} is not known here; 'function' is")
    function = tool.function
    if function is None:
        raise _refused(f"{name}.function", "is missing", "missing_required_parameter")
    if not 0 < len(function.name) <= _LONGEST_NAME:
        raise _refused(f"{name}.function.name", f"must have 1 to {_LONGEST_NAME} characters")
    described = {} if function.description is None else {"description": function.description}
    return {
        "type": "function",
        "function": {
            "name": function.name,
            **described,
            "parameters": function.parameters or _TAKES_NOTHING,
        },
    }


def _schema(tool: ToolDefinition, *, loose: bool) -> Tool:
    assert tool.function is not None  # or `_told` would have refused it
    function = tool.function
    return Tool(function.name, _TAKES_ALL if loose and not function.strict else function.parameters)


def _refused(param: str, why: str, code: str = "invalid_value") -> RequestError:
    return RequestError(400, f"{param}: {why}", param=param, code=code)

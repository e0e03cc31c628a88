"""Grammars that make an answer call tools: from the tools and a choice to what an engine compiles.

It knows how models write their calls, as far as that is one text around JSON; reading the
calls out of an answer is the frontend's business, and so is telling the model of its tools.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from drumline.contract.grammar import GrammarKey, GrammarKind
from drumline.core.errors import RequestError, quoted


class CallFormat(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, one below the other; Qwen's, too."""
    LLAMA_JSON = "llama3_json"
    """`{"name": …, "parameters": …}`, and nothing else; one call."""
    JSON = "json"
    """`[{"name": …, "arguments": …}]`, and nothing else."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": …, "arguments": …}]`."""
    MISTRAL_ARGS = "mistral_args"
    """`[TOOL_CALLS]NAME[ARGS]{…}`, one behind the other: Mistral's later models."""
    DEEPSEEK = "deepseek_v3"
    """`function<sep>NAME`, and the arguments as JSON in a fence, between marks of their own."""
    QWEN_XML = "qwen3_coder"
    """`<tool_call><function=NAME><parameter=…>…</parameter></function></tool_call>`."""


MISTRAL_BEGIN = "[TOOL_CALLS]"
MISTRAL_ARGS = "[ARGS]"
DEEPSEEK_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
DEEPSEEK_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
DEEPSEEK_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


class Tool(Struct, frozen=True):
    """A function that an answer may call."""

    name: str
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments; None for one that takes none."""


class Forced(StrEnum):
    """What an answer must do, where no tool is named."""

    REQUIRED = "required"
    """It calls at least one tool, and says nothing else."""
    AUTO = "auto"
    """It says what it likes; a call that it makes is held to its tool's schema."""


def call_grammar(
    tools: Sequence[Tool],
    choice: Forced | str,
    format_: CallFormat,
    *,
    parallel: bool = True,
) -> GrammarKey:
    """Return the grammar of an answer that calls `tools`; `choice` may be the name of one.

    Without `parallel` it calls one tool at most. Raises RequestError 400 for a tool that there
    is not, and for `auto` where calls cannot be told from other text. A schema that cannot be
    honoured is refused by the engine that compiles the grammar.
    """
    if not isinstance(choice, Forced):
        tools = [tool for tool in tools if tool.name == choice]
        if not tools:
            raise RequestError(
                400,
                f"tool_choice names {quoted(choice)}, which is none of tools",
                param="tool_choice",
            )
    if not tools:
        raise RequestError(400, "tools is empty; a call needs at least one", param="tools")
    if choice is Forced.AUTO:
        written = _perhaps(tools, format_, parallel=parallel)
    else:
        written = _certainly(tools, format_, parallel=parallel)
    return GrammarKey(GrammarKind.STRUCTURAL_TAG, json.dumps({"format": written}))


def _certainly(tools: Sequence[Tool], format_: CallFormat, *, parallel: bool) -> dict[str, object]:
    # A named tool is called once, as OpenAI's API has it.
    once = not parallel or len(tools) == 1
    match format_:
        case CallFormat.HERMES | CallFormat.QWEN_XML:
            # What XML holds is no JSON, which is all that a schema bounds; it is read as well.
            return _calls([_hermes(tool) for tool in tools], "\n", once=once)
        case CallFormat.LLAMA_JSON:
            return _calls([_call(tool, "parameters") for tool in tools], "", once=True)
        case CallFormat.JSON:
            return _listed(tools, "[", once=once)
        case CallFormat.MISTRAL:
            return _listed(tools, f"{MISTRAL_BEGIN}[", once=once)
        case CallFormat.MISTRAL_ARGS:
            return _calls([_named(tool) for tool in tools], "", once=once)
        case CallFormat.DEEPSEEK:
            calls = _calls([_deepseek(tool) for tool in tools], "\n", once=once)
            around = [_text(DEEPSEEK_BEGIN), calls, _text(DEEPSEEK_END)]
            return {"type": "sequence", "elements": around}


def _perhaps(tools: Sequence[Tool], format_: CallFormat, *, parallel: bool) -> dict[str, object]:
    if format_ is not CallFormat.HERMES:
        raise RequestError(
            400,
            f"tool_choice 'auto' cannot be held to a grammar in the format {format_.value}, in "
            "which nothing tells a call from other text; 'required' can",
            param="tool_choice",
        )
    return {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [_hermes(tool) for tool in tools],
        "stop_after_first": not parallel,
    }


def _calls(tags: list[dict[str, object]], separator: str, *, once: bool) -> dict[str, object]:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": once,
    }


def _listed(tools: Sequence[Tool], begin: str, *, once: bool) -> dict[str, object]:
    calls = _calls([_call(tool, "arguments") for tool in tools], ", ", once=once)
    return {"type": "sequence", "elements": [_text(begin), calls, _text("]")]}


def _named(tool: Tool) -> dict[str, object]:
    return _tag(tool, f"{MISTRAL_BEGIN}{tool.name}{MISTRAL_ARGS}", "")


def _deepseek(tool: Tool) -> dict[str, object]:
    head = f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}{tool.name}\n```json\n"
    return _tag(tool, head, f"\n```{DEEPSEEK_CALL_END}")


def _hermes(tool: Tool) -> dict[str, object]:
    return _call(tool, "arguments", "<tool_call>\n", "\n</tool_call>")


def _call(tool: Tool, member: str, before: str = "", after: str = "") -> dict[str, object]:
    begin = f'{before}{{"name": {json.dumps(tool.name)}, "{member}": '
    return _tag(tool, begin, f"}}{after}")


def _tag(tool: Tool, begin: str, end: str) -> dict[str, object]:
    """Return a tag around the arguments of a call."""
    none: dict[str, Any] = {"type": "object", "additionalProperties": False}
    schema = none if tool.parameters is None else tool.parameters
    return {
        "type": "tag",
        "begin": begin,
        "content": {"type": "json_schema", "json_schema": schema},
        "end": end,
    }


def _text(value: str) -> dict[str, object]:
    return {"type": "const_string", "value": value}

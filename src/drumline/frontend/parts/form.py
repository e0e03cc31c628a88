"""How a model writes reasoning and calls: what the operator says, or its chat template shows."""

import re

from msgspec import Struct

from drumline.client.tool_calls import CallFormat
from drumline.core.config import ChatConfig, ReasoningParser, ToolCallParser
from drumline.frontend.parts.calls import STYLES
from drumline.frontend.parts.reasoning import BEGIN, END

_TOOLS = re.compile(r"\btools\b")
_OTHER = ("<function=", "[TOOL_CALLS]", "tool_calls_section_begin", "tool▁calls▁begin")
"""Marks of formats that are not read; without one of ours, calls in them would pass for words."""
_NAMED = {
    ToolCallParser.HERMES: CallFormat.HERMES,
    ToolCallParser.QWEN: CallFormat.HERMES,
    ToolCallParser.QWEN25: CallFormat.HERMES,
    ToolCallParser.LLAMA3: CallFormat.LLAMA_JSON,
    ToolCallParser.LLAMA3_JSON: CallFormat.LLAMA_JSON,
    ToolCallParser.JSON: CallFormat.JSON,
}


class AnswerForm(Struct, frozen=True, kw_only=True):
    """What is known of a model's answers."""

    takes_tools: bool = False
    """Whether its chat template tells it of tools."""
    calls: CallFormat | None = None
    """How it writes calls; None where that is not known, or not to be read."""
    reasons: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that must be seen in the text, also where a model has tokens for them."""
        style = None if self.calls is None else STYLES[self.calls]
        calls = () if style is None else (style.begin, style.end)
        return tuple(filter(None, (*calls, *((BEGIN, END) if self.reasons else ()))))


def form_of(template: str | None, chat: ChatConfig) -> AnswerForm:
    """Return how a model with this chat template answers, as far as the operator leaves it open."""
    template = template or ""
    takes_tools = _TOOLS.search(template) is not None
    match chat.tool_call_parser:
        case ToolCallParser.AUTO:
            calls = _shown(template) if takes_tools else None
        case ToolCallParser.NONE:
            calls = None
        case named:
            calls = _NAMED[named]
    reasons = (
        END in template
        if chat.reasoning_parser is ReasoningParser.AUTO
        else chat.reasoning_parser is not ReasoningParser.NONE
    )
    return AnswerForm(takes_tools=takes_tools, calls=calls, reasons=reasons)


def _shown(template: str) -> CallFormat | None:
    if any(mark in template for mark in _OTHER):
        return None
    if "<tool_call>" in template:
        return CallFormat.HERMES
    if "<|python_tag|>" in template or re.search(r"""["']parameters["']\s*:""", template):
        return CallFormat.LLAMA_JSON
    return CallFormat.JSON

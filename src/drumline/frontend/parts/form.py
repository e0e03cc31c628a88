"""How a model writes reasoning and calls: what the operator says, or its chat template shows."""

import re

from msgspec import Struct

from drumline.client.tool_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_SEPARATOR,
    MISTRAL_ARGS,
    MISTRAL_BEGIN,
    CallFormat,
)
from drumline.core.config import ChatConfig, ReasoningParser, ToolCallParser
from drumline.frontend.parts import named_calls
from drumline.frontend.parts.calls import STYLES
from drumline.frontend.parts.reasoning import BEGIN, END
from drumline.frontend.parts.whole_calls import DEEPSEEK, QWEN_XML

_TOOLS = re.compile(r"\btools\b")
_OTHER = ("tool_calls_section_begin",)
"""Marks of formats that are not read; without one of ours, calls in them would pass for words."""
_NAMED = {
    ToolCallParser.HERMES: CallFormat.HERMES,
    ToolCallParser.QWEN: CallFormat.HERMES,
    ToolCallParser.QWEN25: CallFormat.HERMES,
    ToolCallParser.LLAMA3: CallFormat.LLAMA_JSON,
    ToolCallParser.LLAMA3_JSON: CallFormat.LLAMA_JSON,
    ToolCallParser.JSON: CallFormat.JSON,
    ToolCallParser.MISTRAL: CallFormat.MISTRAL,
    ToolCallParser.DEEPSEEK_V3: CallFormat.DEEPSEEK,
    ToolCallParser.DEEPSEEK_V31: CallFormat.DEEPSEEK,
    ToolCallParser.QWEN3_CODER: CallFormat.QWEN_XML,
}


_MARKS: dict[CallFormat, tuple[str, ...]] = {
    **{format_: (style.begin, style.end) for format_, style in STYLES.items()},
    CallFormat.DEEPSEEK: (*DEEPSEEK.marks, DEEPSEEK_SEPARATOR),
    CallFormat.QWEN_XML: QWEN_XML.marks,
    CallFormat.MISTRAL_ARGS: named_calls.MARKS,
}
_BY_MARK = (
    ("<function=", CallFormat.QWEN_XML),
    ("<tool_call>", CallFormat.HERMES),
    (MISTRAL_ARGS, CallFormat.MISTRAL_ARGS),
    (MISTRAL_BEGIN, CallFormat.MISTRAL),
    (DEEPSEEK_BEGIN, CallFormat.DEEPSEEK),
)
"""How templates show formats; the first that is found."""


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
        calls = () if self.calls is None else _MARKS[self.calls]
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
        case ToolCallParser.MISTRAL if MISTRAL_ARGS in template:
            calls = CallFormat.MISTRAL_ARGS
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
    for mark, format_ in _BY_MARK:
        if mark in template:
            return format_
    if "<|python_tag|>" in template or re.search(r"""["']parameters["']\s*:""", template):
        return CallFormat.LLAMA_JSON
    return CallFormat.JSON

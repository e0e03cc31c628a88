"""Reading an answer: reasoning first, then words and calls."""

from msgspec import Struct

from drumline.client.tool_calls import CallFormat
from drumline.frontend.parts.calls import STYLES, CallReader
from drumline.frontend.parts.named_calls import NamedCallReader
from drumline.frontend.parts.part import Part, Reasoning, Words, joined
from drumline.frontend.parts.reasoning import ReasoningReader
from drumline.frontend.parts.whole_calls import DEEPSEEK, QWEN_XML, Schemas, WholeCallReader


class Reading(Struct, frozen=True, kw_only=True):
    """What is looked for in the answers to one request."""

    reasons: bool = False
    opened: bool = False
    """Whether the prompt ends inside of reasoning."""
    calls: CallFormat | None = None
    tools: Schemas = {}
    """What the tools take that may be called."""
    most_calls: int | None = None


def _call_reader(reading: Reading) -> CallReader | WholeCallReader | NamedCallReader | None:
    names = frozenset(reading.tools)
    match reading.calls:
        case None:
            return None
        case CallFormat.DEEPSEEK:
            return WholeCallReader(DEEPSEEK, reading.tools, most=reading.most_calls)
        case CallFormat.QWEN_XML:
            return WholeCallReader(QWEN_XML, reading.tools, most=reading.most_calls)
        case CallFormat.MISTRAL_ARGS:
            return NamedCallReader(names, most=reading.most_calls)
        case format_:
            return CallReader(STYLES[format_], names, most=reading.most_calls)


class AnswerReader:
    """The parts of one answer, as its text comes. Its parts are the same for any deltas."""

    __slots__ = ("_calls", "_reasoning")

    def __init__(self, reading: Reading) -> None:
        """Look for what `reading` names; all else is words."""
        self._reasoning = ReasoningReader(opened=reading.opened) if reading.reasons else None
        self._calls = _call_reader(reading)

    @property
    def called(self) -> bool:
        """Whether the answer has called a tool so far."""
        return self._calls is not None and self._calls.calls > 0

    def add(self, text: str) -> list[Part]:
        """Return the parts that `text` completes."""
        return self._read(*(("", text) if self._reasoning is None else self._reasoning.add(text)))

    def finish(self) -> list[Part]:
        """Return what was held back; nothing comes after it."""
        parts = [] if self._reasoning is None else self._read(*self._reasoning.finish())
        return joined(parts + ([] if self._calls is None else self._calls.finish()))

    def _read(self, reasoning: str, text: str) -> list[Part]:
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        if self._calls is not None:
            parts += self._calls.add(text)
        elif text:
            parts.append(Words(text))
        return joined(parts) if len(parts) > 1 else parts

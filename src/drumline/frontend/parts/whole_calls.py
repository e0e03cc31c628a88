"""Finding calls of tools that are read once they are complete.

Of formats whose arguments are no JSON as they stand, or whose names stand far from them. What
turns out to be no call comes out as words, with its marks.
"""

import json
import re
from collections.abc import Callable, Mapping
from enum import IntEnum, auto
from typing import Any

from msgspec import Struct

from drumline.client.tool_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
)
from drumline.frontend.parts.json_text import inside_strings, no_number
from drumline.frontend.parts.marks import may_begin, split_at, unsure
from drumline.frontend.parts.part import Arguments, CallBegun, Part, Words
from drumline.frontend.parts.steps import stepped

Schemas = Mapping[str, Mapping[str, Any] | None]
"""What tools take, by their names."""
Parsed = tuple[str, str] | None
"""A tool's name and the JSON of its arguments; None for what is no call."""

_FENCE, _FENCE_END = "\n```json\n", "\n```"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


class WholeStyle(Struct, frozen=True):
    """The marks of a call, perhaps those around all calls, and how what is inside is read."""

    begin: str
    end: str
    parse: Callable[[str, Schemas], Parsed]
    all_begin: str = ""
    all_end: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.end, self.all_begin, self.all_end


def deepseek_call(body: str, schemas: Schemas) -> Parsed:
    """Read a call of DeepSeek's: `NAME<sep>JSON`, or `function<sep>NAME` and JSON in a fence."""
    name, separated, arguments = body.partition(DEEPSEEK_SEPARATOR)
    if not separated:
        return None
    if _FENCE in arguments:
        name, _, arguments = arguments.partition(_FENCE)
        arguments = arguments.removesuffix("\n").removesuffix(_FENCE_END)
    try:
        if not isinstance(json.loads(arguments, strict=False, parse_constant=no_number), dict):
            return None
    except (ValueError, RecursionError):
        return None
    return name.strip(), inside_strings(arguments.strip())


def qwen_call(body: str, schemas: Schemas) -> Parsed:
    """Read a call of Qwen3-Coder's, in XML, or one in JSON, as answers are held to."""
    found = _FUNCTION.fullmatch(body)
    if found is None:
        return _json_call(body)
    name, inner = found.groups()
    schema = schemas.get(name) or {}
    properties = schema.get("properties")
    arguments: dict[str, Any] = {}
    at = 0
    while parameter := _PARAMETER.match(inner, at):
        told = properties.get(parameter[1]) if isinstance(properties, dict) else None
        arguments[parameter[1]] = _value(parameter[2], told)
        at = parameter.end()
    if inner[at:].strip():
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def _json_call(body: str) -> Parsed:
    try:
        call = json.loads(body, strict=False, parse_constant=no_number)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return (call["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _value(text: str, schema: Any) -> Any:
    """Return a parameter's value: text where its schema says so or it is nothing else."""
    text = text.removeprefix("\n").removesuffix("\n")
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError):
        return text


class _At(IntEnum):
    WORDS = auto()
    INSIDE = auto()
    """Behind the mark that begins a call."""
    BETWEEN = auto()
    """Behind a call, or behind the mark that begins all."""


class WholeCallReader:
    """Cuts one stream of text into words and calls."""

    __slots__ = ("_at", "_body", "_gap", "_held", "_most", "_schemas", "_style", "calls")

    def __init__(self, style: WholeStyle, schemas: Schemas, *, most: int | None = None) -> None:
        """Find calls of the tools that take `schemas`, the first `most` of them."""
        self._style = style
        self._schemas = schemas
        self._most = most
        self._at = _At.WORDS
        self._held = ""
        self._body: list[str] = []
        """What was read of a call whose end has not come."""
        self._gap = ""
        """What was read around calls, and is words if no call follows."""
        self.calls = 0
        """How many have begun."""

    def add(self, text: str) -> list[Part]:
        """Return the parts that `text` completes."""
        self._held += text
        return stepped(self)

    @property
    def standing(self) -> tuple[int, int]:
        """Its state, and how many characters it holds."""
        return self._at, len(self._held)

    def step(self, parts: list[Part]) -> None:
        """Take of what is held as much as the state can; add the parts that this completes."""
        match self._at:
            case _At.WORDS:
                self._words(parts)
            case _At.INSIDE:
                self._inside(parts)
            case _At.BETWEEN:
                self._between(parts)

    def finish(self) -> list[Part]:
        """Return what was held back; nothing comes after it."""
        text, self._held = self._held, ""
        parts: list[Part] = []
        if self._at is _At.INSIDE:
            self._called(parts, text, "")
        elif self._at is _At.WORDS or text.strip() or not self.calls:
            text = self._gap + text
            parts = [Words(text)] if text else []
        return parts

    def _words(self, parts: list[Part]) -> None:
        marks = [mark for mark in (self._style.all_begin, self._style.begin) if mark]
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            sure, self._held = self._held[:at], self._held[at + len(mark) :]
            self._gap = mark
            self._at = _At.INSIDE if mark == self._style.begin else _At.BETWEEN
        else:
            kept = len(self._held) - max(unsure(self._held, mark) for mark in marks)
            sure, self._held = self._held[:kept], self._held[kept:]
        if sure:
            parts.append(Words(sure))

    def _inside(self, parts: list[Part]) -> None:
        sure, self._held, ended = split_at(self._held, self._style.end)
        self._body.append(sure)
        if ended:
            self._called(parts, "", self._style.end)

    def _called(self, parts: list[Part], rest: str, end: str) -> None:
        """Take what stands between a call's marks, `rest` being the last of it."""
        body, self._body = "".join([*self._body, rest]), []
        call = self._style.parse(body, self._schemas)
        if call is None or call[0] not in self._schemas:
            parts.append(Words(self._gap + body + end))
            self._gap, self._at = "", _At.WORDS
            return
        self._gap, self._at = "", _At.BETWEEN
        self.calls += 1
        if self._most is None or self.calls <= self._most:
            parts += [CallBegun(self.calls - 1, call[0]), Arguments(self.calls - 1, call[1])]

    def _between(self, parts: list[Part]) -> None:
        style = self._style
        rest = self._held.lstrip()
        taken = len(self._held) - len(rest)
        if rest.startswith(style.begin):
            self._gap += self._held[:taken] + style.begin
            self._held = rest.removeprefix(style.begin)
            self._at = _At.INSIDE
        elif style.all_end and self.calls and rest.startswith(style.all_end):
            self._gap = ""
            self._held = rest.removeprefix(style.all_end)
        elif rest and not may_begin(rest, style.begin) and not may_begin(rest, style.all_end):
            parts.append(Words(self._gap + self._held))
            self._gap = self._held = ""
            self._at = _At.WORDS


DEEPSEEK = WholeStyle(DEEPSEEK_CALL, DEEPSEEK_CALL_END, deepseek_call, DEEPSEEK_BEGIN, DEEPSEEK_END)
QWEN_XML = WholeStyle("<tool_call>", "</tool_call>", qwen_call)

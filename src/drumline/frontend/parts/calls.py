"""Finding the calls of tools in an answer's text.

Two shapes: a mark in front of each call, which may stand anywhere in the text, and bare JSON,
which an answer must begin with. The calls themselves are read by `CallObject`.
"""

from enum import IntEnum, auto

from msgspec import Struct

from drumline.client.tool_calls import MISTRAL_BEGIN, CallFormat
from drumline.frontend.parts.call_object import CallObject
from drumline.frontend.parts.marks import may_begin, space_before, split_at
from drumline.frontend.parts.part import Arguments, CallBegun, Part, Words
from drumline.frontend.parts.steps import stepped


class CallStyle(Struct, frozen=True):
    """How calls are set off from other text."""

    begin: str = ""
    """The mark before a call; none where only bare JSON is one."""
    end: str = ""
    """The mark behind a call."""
    bare: bool = False
    """Whether an answer that begins with JSON may begin with a call."""
    listed: bool = False
    """Whether calls stand in a list behind the mark."""


STYLES = {
    CallFormat.HERMES: CallStyle("<tool_call>", "</tool_call>"),
    CallFormat.LLAMA_JSON: CallStyle("<|python_tag|>", bare=True),
    CallFormat.JSON: CallStyle(bare=True),
    CallFormat.MISTRAL: CallStyle(MISTRAL_BEGIN, listed=True),
}


class _At(IntEnum):
    START = auto()
    WORDS = auto()
    MARKED = auto()
    """Where an object must begin."""
    OBJECT = auto()
    CLOSING = auto()
    """Behind an object, before the mark that ends its call."""
    BETWEEN = auto()
    """Behind a call, in what separates it from the next."""


class CallReader:
    """Cuts one stream of text into words and calls."""

    __slots__ = ("_at", "_gap", "_held", "_most", "_names", "_object", "_style", "calls")

    def __init__(self, style: CallStyle, names: frozenset[str], *, most: int | None = None) -> None:
        """Find calls of the tools with these `names`, the first `most` of them."""
        self._style = style
        self._names = names
        self._most = most
        self._at = _At.START if style.bare else _At.WORDS
        self._held = ""
        self._gap = ""
        """What was read around calls, and is words if no call follows."""
        self._object = CallObject(names)
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
            case _At.OBJECT:
                self._in_object(parts)
            case _At.CLOSING:
                self._closing(parts)
            case _:
                self._before_object(parts)

    def finish(self) -> list[Part]:
        """Return what was held back; nothing comes after it."""
        text, self._held, self._gap = self._gap + self._held, "", ""
        if self._at is _At.OBJECT:
            text = "" if self._object.begun else text + self._object.raw
        elif self._at in {_At.CLOSING, _At.BETWEEN} and not text.strip(" \t\r\n,;]"):
            text = ""  # what ends a call, or separates it from one that did not come
        return [Words(text)] if text else []

    def _words(self, parts: list[Part]) -> None:
        sure, self._held, begun = split_at(self._held, self._style.begin)
        if begun:
            self._gap, self._at = self._style.begin, _At.MARKED
        if sure:
            parts.append(Words(sure))

    def _before_object(self, parts: list[Part]) -> None:
        """Read what may stand before an object, or find that none comes."""
        style = self._style
        separators = ",;]" if self._at is _At.BETWEEN else "["
        loose = style.bare or style.listed
        rest = self._held.lstrip(" \t\r\n" + (separators if loose else ""))
        taken = len(self._held) - len(rest)
        self._gap, self._held = self._gap + self._held[:taken], rest
        if not rest:
            return
        marked = self._at is _At.MARKED
        if rest[0] == "{" and (marked or loose):
            self._object = CallObject(self._names)
            self._at = _At.OBJECT
        elif style.begin and not marked and rest.startswith(style.begin):
            self._gap += style.begin
            self._held = rest.removeprefix(style.begin)
            self._at = _At.MARKED
        elif marked or not may_begin(rest, style.begin):
            self._no_call(parts)

    def _in_object(self, parts: list[Part]) -> None:
        read = self._object
        begun = read.begun
        self._held = self._held[read.take(self._held) :]
        if read.begun and not begun:
            self._gap = ""
            self.calls += 1
        wanted = self._most is None or self.calls <= self._most
        if read.begun and wanted:
            if not begun:
                parts.append(CallBegun(self.calls - 1, read.name or ""))
            grown = read.drained()
            if grown:
                parts.append(Arguments(self.calls - 1, grown))
        if read.ended:
            self._at = _At.CLOSING if self._style.end else _At.BETWEEN
        elif read.failed:
            self._gap += read.raw
            self._no_call(parts)

    def _closing(self, parts: list[Part]) -> None:
        end = self._style.end
        space = space_before(self._held)
        rest = self._held[space:]
        if rest.startswith(end):
            self._gap = ""
            self._held = rest.removeprefix(end)
            self._at = _At.BETWEEN
        elif rest and not may_begin(rest, end):
            self._no_call(parts)

    def _no_call(self, parts: list[Part]) -> None:
        """Go on with words, of which those in the gap are the first."""
        if self._gap:
            parts.append(Words(self._gap))
        self._gap = ""
        self._at = _At.WORDS

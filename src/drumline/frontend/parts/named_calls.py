"""Finding calls of tools that are written `[TOOL_CALLS]NAME[ARGS]{…}`, one behind the other.

Arguments are given out as they come. What turns out to be no call comes out as words.
"""

from enum import IntEnum, auto

from drumline.client.tool_calls import MISTRAL_ARGS, MISTRAL_BEGIN
from drumline.frontend.parts.marks import may_begin, space_before, split_at
from drumline.frontend.parts.nesting import Nesting
from drumline.frontend.parts.part import Arguments, CallBegun, Part, Words
from drumline.frontend.parts.steps import stepped

MARKS = (MISTRAL_BEGIN, MISTRAL_ARGS)
_CALL_ID = "[CALL_ID]"
"""What some models put between a name and its arguments, with an id that clients get anew."""
_LONGEST_HEAD = 200


class _At(IntEnum):
    WORDS = auto()
    HEAD = auto()
    """Behind the mark that begins a call, where its name is."""
    OPEN = auto()
    """Where its arguments must begin."""
    ARGUMENTS = auto()
    BETWEEN = auto()
    """Behind a call."""


class NamedCallReader:
    """Cuts one stream of text into words and calls."""

    __slots__ = (
        "_at",
        "_gap",
        "_held",
        "_most",
        "_name",
        "_names",
        "_nesting",
        "calls",
    )

    def __init__(self, names: frozenset[str], *, most: int | None = None) -> None:
        """Find calls of the tools with these `names`, the first `most` of them."""
        self._names = names
        self._most = most
        self._at = _At.WORDS
        self._held = ""
        self._gap = ""
        """What was read around calls, and is words if no call follows."""
        self._name = ""
        self._nesting = Nesting()
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
            case _At.HEAD:
                self._head(parts)
            case _At.OPEN:
                self._open(parts)
            case _At.ARGUMENTS:
                self._arguments(parts)
            case _At.BETWEEN:
                self._between(parts)

    def finish(self) -> list[Part]:
        """Return what was held back; nothing comes after it."""
        text, self._held, self._gap = self._gap + self._held, "", ""
        if self._at is _At.BETWEEN and not text.strip():
            return []
        return [Words(text)] if text else []

    def _words(self, parts: list[Part]) -> None:
        sure, self._held, begun = split_at(self._held, MISTRAL_BEGIN)
        if begun:
            self._gap, self._at = MISTRAL_BEGIN, _At.HEAD
        if sure:
            parts.append(Words(sure))

    def _head(self, parts: list[Part]) -> None:
        end = self._held.find(MISTRAL_ARGS, 0, _LONGEST_HEAD)
        if end < 0:
            if len(self._held) >= _LONGEST_HEAD:
                self._no_call(parts)
            return
        self._name = self._held[:end].partition(_CALL_ID)[0].strip()
        if self._name not in self._names:
            self._no_call(parts)
            return
        head = end + len(MISTRAL_ARGS)
        self._gap, self._held = self._gap + self._held[:head], self._held[head:]
        self._at = _At.OPEN

    def _open(self, parts: list[Part]) -> None:
        space = space_before(self._held)
        self._gap, self._held = self._gap + self._held[:space], self._held[space:]
        if self._held and self._held[0] != "{":
            self._no_call(parts)
        elif self._held:
            self._gap, self._at = "", _At.ARGUMENTS
            self.calls += 1
            if self._wanted:
                parts.append(CallBegun(self.calls - 1, self._name))

    def _arguments(self, parts: list[Part]) -> None:
        text, at = self._held, 0
        grown: list[str] = []
        nesting = self._nesting
        while at < len(text) and self._at is _At.ARGUMENTS:
            end = nesting.plain_end(text, at)
            if end > at:
                grown.append(nesting.escaped(text[at:end]))
                at = end
                continue
            grown.append(nesting.escaped(text[at]))
            nesting.step(text[at])
            at += 1
            if not nesting.open:
                self._at = _At.BETWEEN
        self._held = text[at:]
        if self._wanted:
            parts.append(Arguments(self.calls - 1, "".join(grown)))

    def _between(self, parts: list[Part]) -> None:
        space = space_before(self._held)
        rest = self._held[space:]
        if rest.startswith(MISTRAL_BEGIN):
            self._gap = self._held[:space] + MISTRAL_BEGIN
            self._held = rest.removeprefix(MISTRAL_BEGIN)
            self._at = _At.HEAD
        elif rest and not may_begin(rest, MISTRAL_BEGIN):
            self._at = _At.WORDS

    def _no_call(self, parts: list[Part]) -> None:
        """Go on with words, of which those in the gap are the first."""
        parts.append(Words(self._gap))
        self._gap, self._at = "", _At.WORDS

    @property
    def _wanted(self) -> bool:
        return self._most is None or self.calls <= self._most

"""One JSON object that may be a call of a tool, read as its text comes.

A call has a member `name`, which is a tool's, and perhaps `arguments` or `parameters`, an
object or the text of one. Nothing is given out before both are known to be there or the
object has ended; from then on its arguments are given out as they come, as they are written.
"""

import json
from enum import IntEnum, auto

from drumline.frontend.parts.json_text import inside_strings, no_number
from drumline.frontend.parts.nesting import Nesting

_MEMBERS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_VALUES = '"{[-0123456789tfn'
_WITHOUT = "{}"


class _At(IntEnum):
    OPEN = auto()
    NAME = auto()
    IN_NAME = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    NEXT = auto()
    ENDED = auto()
    FAILED = auto()


class CallObject:
    """Where one object stands."""

    __slots__ = (
        "_arguments",
        "_at",
        "_member",
        "_names",
        "_nesting",
        "_raw",
        "_streams",
        "_token",
        "begun",
        "name",
    )

    def __init__(self, names: frozenset[str]) -> None:
        """Read an object that calls one of the tools with these `names`."""
        self._names = names
        self._at = _At.OPEN
        self._member = ""
        self._token: list[str] = []
        self._nesting = Nesting()
        """Of the name or value that is being read."""
        self._streams = False
        self._arguments: list[str] | None = None
        self.name: str | None = None
        self.begun = False
        """Whether this is a call for certain."""
        self._raw: list[str] = []

    @property
    def raw(self) -> str:
        """What was read and is no part of a call (yet)."""
        return "".join(self._raw)

    @property
    def ended(self) -> bool:
        """Whether the object is complete, and is a call."""
        return self._at is _At.ENDED

    @property
    def failed(self) -> bool:
        """Whether it is no object, or none that calls a tool, from the next character on."""
        return self._at is _At.FAILED

    def take(self, text: str) -> int:
        """Read of `text` what belongs to the object; return how much that was."""
        at = 0
        while at < len(text):
            if self._at is _At.IN_VALUE and self._nesting.open:
                # Most of a value decides nothing and is taken in one go.
                end = self._nesting.plain_end(text, at)
                if end > at:
                    self._keep(text[at:end])
                    at = end
                    continue
            known = len(self._raw)
            self._step(text[at])
            if self._at is _At.FAILED:
                return at + (len(self._raw) > known)
            at += 1
            if self._at is _At.ENDED:
                return at
        return at

    def drained(self) -> str:
        """Return what the arguments grew by, once the call has begun."""
        if not self.begun or self._arguments is None:
            return ""
        grown, self._arguments = self._arguments, []
        return "".join(grown)

    def _step(self, char: str) -> None:
        if self._at is _At.IN_VALUE:
            self._in_value(char)
        elif self._at is _At.IN_NAME:
            self._raw.append(char)
            self._token.append(char)
            self._nesting.step(char)
            if not self._nesting.open:
                self._member = self._unquoted()
                self._at = _At.COLON
        elif char in _SPACE:
            self._raw.append(char)
        else:
            self._at = self._following(char)
            if self._at is _At.IN_VALUE:
                self._begin_value(char)
                self._in_value(char)
            elif self._at not in {_At.FAILED, _At.ENDED}:
                self._raw.append(char)

    def _following(self, char: str) -> _At:
        """Return the state behind a character between members."""
        match self._at, char:
            case _At.OPEN, "{":
                return _At.NAME
            case _At.NAME, '"':
                self._token, self._nesting = [char], Nesting()
                self._nesting.step(char)
                return _At.IN_NAME
            case _At.COLON, ":":
                return _At.VALUE
            case _At.NEXT, ",":
                return _At.NAME
            case ((_At.NAME | _At.NEXT), "}"):
                return self._closed()
            case _At.VALUE, _ if char in _VALUES:
                return _At.IN_VALUE
        return _At.FAILED

    def _closed(self) -> _At:
        if not self.begun:
            if self.name is None:
                return _At.FAILED
            self._arguments = [_WITHOUT] if self._arguments is None else self._arguments
            self._begin()
        return _At.ENDED

    def _begin(self) -> None:
        self.begun = True
        self._raw = []

    def _begin_value(self, char: str) -> None:
        self._token = []
        self._nesting = Nesting()
        self._streams = char == "{" and self._member in _MEMBERS and self._arguments is None
        if self._streams:
            self._arguments = []
            if self.name is not None:
                self._begin()

    def _in_value(self, char: str) -> None:
        """Read a character of a member's value."""
        if not self._nesting.open and self._token and (char in _SPACE or char in ",}"):
            self._value_ended()
            if self._at is _At.NEXT:
                self._step(char)
            return
        self._keep(char)
        self._nesting.step(char)
        if char in '"}]' and not self._nesting.open:
            self._value_ended()

    def _keep(self, text: str) -> None:
        if not self.begun or not self._streams:
            self._raw.append(text)
        if self._streams and self._arguments is not None:
            self._arguments.append(self._nesting.escaped(text))
        else:
            self._token.append(text)

    def _value_ended(self) -> None:
        self._at = _At.NEXT
        if self._member == "name":
            self.name = self._unquoted()
            if self.name not in self._names:
                self._at = _At.FAILED
            elif self._arguments is not None:
                self._begin()
        elif self._member in _MEMBERS and self._arguments is None:
            said = self._unquoted()
            self._arguments = [inside_strings(said)]
            if not _is_object(said):
                self._at = _At.FAILED
            elif self.name is not None:
                self._begin()

    def _unquoted(self) -> str:
        """Return the string that was read; an empty one for what is none."""
        try:
            said = json.loads("".join(self._token), strict=False)
        except (ValueError, RecursionError):
            return ""
        return said if isinstance(said, str) else ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False, parse_constant=no_number), dict)
    except (ValueError, RecursionError):
        return False

"""Where a piece of JSON's text stands: inside of a string or not, and how deep.

It checks nothing: an end of an array may end an object.
"""

import re

from drumline.frontend.parts.json_text import inside_string

_PLAIN_QUOTED = re.compile(r'[^"\\]*')
_PLAIN_NESTED = re.compile(r'[^"{}\[\]]*')


class Nesting:
    """The strings, objects and arrays that are open behind what was read."""

    __slots__ = ("_depth", "_escaped", "quoted")

    def __init__(self) -> None:
        """Begin before a value."""
        self._depth = 0
        self._escaped = False
        self.quoted = False
        """Whether a string is open."""

    @property
    def open(self) -> bool:
        """Whether a string, an object or an array is."""
        return self.quoted or self._depth > 0

    def plain_end(self, text: str, at: int) -> int:
        """Return the end of the characters of `text` from `at` on that change nothing here."""
        if self._escaped:
            return at
        found = (_PLAIN_QUOTED if self.quoted else _PLAIN_NESTED).match(text, at)
        return at if found is None else found.end()

    def escaped(self, text: str) -> str:
        """Return the next piece of text, its control characters escaped where a string is open."""
        return inside_string(text) if self.quoted else text

    def step(self, char: str) -> None:
        """Take one character."""
        if self.quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.quoted = False
        elif char == '"':
            self.quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

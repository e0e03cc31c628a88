"""Which regexes can be compiled, and mean to a compiler what they mean to their writers.

Compilers leave out, with a warning at most, what they do not know: an anchor in the middle,
a class by its Unicode name. They match a regex as a whole, so `^` may only stand at the
beginning and `$` at the end.
"""

from typing import NoReturn

from drumline.core.errors import quoted
from drumline.grammar.bounds import (
    COUNT,
    MAX_NESTING,
    MAX_REGEX_BYTES,
    MAX_REPEATS,
    RefusedGrammarError,
    check_size,
    times,
)

_LOOKING = (
    ("(?=", "lookahead"),
    ("(?!", "lookahead"),
    ("(?<=", "lookbehind"),
    ("(?<!", "lookbehind"),
)


class _Atom:
    """What a quantifier would repeat."""

    __slots__ = ("anchored", "nullable", "size")

    def __init__(self, size: int = 1, *, nullable: bool = False, anchored: bool = False) -> None:
        self.size = size
        self.nullable = nullable
        self.anchored = anchored


class _Level:
    """An open group, or the whole: its alternatives so far, and the one that is being read."""

    __slots__ = ("anchored", "begun", "ended", "last", "nullable", "size", "solid")

    def __init__(self) -> None:
        self.size = 0
        self.anchored = False
        self.nullable = False
        """Whether an alternative before this one may be empty."""
        self.solid = 0
        """Atoms of this alternative that are never empty."""
        self.begun = self.ended = False
        self.last: _Atom | None = None

    def add(self, atom: _Atom) -> None:
        if self.ended:
            _refuse("`$` anywhere but at the end")
        self.size += atom.size
        self.solid += not atom.nullable
        self.begun = True
        self.last = atom

    def next_alternative(self) -> None:
        self.nullable = self.nullable or not self.solid
        self.solid = 0
        self.begun = self.ended = False
        self.last = None

    def closed(self) -> _Atom:
        nullable = self.nullable or not self.solid
        return _Atom(max(self.size, 1), nullable=nullable, anchored=self.anchored)


def check_regex(pattern: str) -> None:
    """Raise RefusedGrammarError for a regex that is too large, or that no automaton matches."""
    check_size(pattern, MAX_REGEX_BYTES)
    levels, place = [_Level()], 0
    while place < len(pattern):
        place = _read(pattern, place, levels)
        if levels[-1].size > MAX_REPEATS:
            raise RefusedGrammarError(
                f"the regex repeats its parts {levels[-1].size} times in all; "
                f"{MAX_REPEATS} are allowed"
            )


def check_pattern(pattern: str) -> None:
    """Raise RefusedGrammarError for a regex of a JSON string that would break its quotes.

    Character classes are cut down to what may stand in a JSON string; single characters
    outside of them are not, so one that must be escaped there cannot be asked for.
    """
    place = 0
    while place < len(pattern):
        letter = pattern[place]
        if letter == "[":
            place = _class_end(pattern, place)
            continue
        width = 2 if letter == "\\" else 1
        asked = pattern[place : place + width]
        if asked == '"' or asked < " " or (width > 1 and asked[1:] in '\\"ntrfvabxuUc0'):
            raise RefusedGrammarError(
                f"{quoted(asked)} outside of a character class is not supported"
            )
        place += width


def _read(pattern: str, place: int, levels: list[_Level]) -> int:
    """Take what stands at a place; returns the one behind it."""
    level, letter = levels[-1], pattern[place]
    match letter:
        case "\\":
            _check_escape(pattern[place : place + 2])
            level.add(_Atom())
            return place + 2
        case "[":
            level.add(_Atom())
            return _checked_class(pattern, place)
        case "(":
            _check_group(pattern, place)
            if len(levels) > MAX_NESTING:
                raise RefusedGrammarError(f"it is nested more than {MAX_NESTING} levels deep")
            levels.append(_Level())
            return place + 3 if pattern.startswith("(?:", place) else place + 1
        case ")" if len(levels) > 1:
            _close_group(levels)
        case "|":
            level.next_alternative()
        case "^":
            if any(each.begun for each in levels):
                _refuse("`^` anywhere but at the beginning")
            level.anchored = True
        case "$":
            level.ended = level.anchored = True
        case "*" | "+":
            _repeat(level, 1 if letter == "+" else 0, None)
            return place + (2 if pattern[place + 1 : place + 2] == "?" else 1)
        case "?":
            _repeat(level, 0, 1)
        case "{" if found := COUNT.match(pattern, place):
            least, most = times(found)
            _repeat(level, least, most)
            return found.end()
        case _:
            level.add(_Atom())
    return place + 1


def _close_group(levels: list[_Level]) -> None:
    group = levels.pop()
    atom = group.closed()
    levels[-1].add(atom)
    # Of its alternatives, one that ends the text ends it for what follows the group, too.
    levels[-1].anchored = levels[-1].anchored or group.anchored
    levels[-1].ended = group.ended


def _repeat(level: _Level, least: int, most: int | None) -> None:
    atom = level.last
    if atom is None:
        return  # a letter to some compilers, a fault to others
    if atom.anchored:
        _refuse("a repeat of what holds `^` or `$`")
    if most is None and atom.nullable:
        _refuse("a repeat without end of what may be empty")
    repeats = max(least, most or 1, 1)
    level.size += atom.size * (repeats - 1)
    level.solid -= least == 0 and not atom.nullable
    level.last = _Atom(atom.size * repeats, nullable=atom.nullable or least == 0)


def _checked_class(pattern: str, place: int) -> int:
    """Return the place behind the character class that opens at `place`."""
    end = _class_end(pattern, place)
    inside = place + 1
    while inside < end - 1:
        if pattern[inside] == "\\":
            _check_escape(pattern[inside : inside + 2])
            inside += 1
        inside += 1
    return end


def _class_end(pattern: str, place: int) -> int:
    """Return the place behind the character class that opens at `place`."""
    place += 1
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1


def _check_escape(escape: str) -> None:
    if escape[1:].isdigit() and escape != "\\0":
        _refuse(f"{escape}, which refers back")
    if escape in {"\\b", "\\B", "\\k", "\\p", "\\P"}:
        _refuse(escape)


def _check_group(pattern: str, place: int) -> None:
    for opening, name in _LOOKING:
        if pattern.startswith(opening, place):
            _refuse(f"{name} ({opening})")


def _refuse(what: str) -> NoReturn:
    raise RefusedGrammarError(f"the regex uses {what}, which is not supported")

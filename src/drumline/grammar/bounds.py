"""What a client's grammar may cost, checked before anything compiles it.

Compilers take time and memory that grow much faster than what they are given;
these limits keep away what is known to be hopeless. What passes them may still be
slow: that is bounded where it runs.
"""

import re

MAX_SOURCE_BYTES = 64 * 1024
MAX_REGEX_BYTES = 4 * 1024
MAX_NESTING = 64
MAX_REPEATS = 100_000
"""Times the atoms of a regex may be repeated, nested repeats multiplied."""
MAX_CHOICES = 4096
MAX_RULES = 1024

_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_LONGEST_COUNT = 6
_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class RefusedGrammarError(Exception):
    """A grammar that can never be compiled here; the message says why, to its client."""


def check_size(source: str, limit: int = MAX_SOURCE_BYTES) -> None:
    """Raise RefusedGrammarError for a source of more than `limit` bytes, or no UTF-8."""
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise RefusedGrammarError("it holds an unpaired surrogate, which is no text") from None
    if size > limit:
        raise RefusedGrammarError(f"it has {size} bytes; {limit} are allowed")


def check_json_nesting(source: str) -> None:
    """Raise RefusedGrammarError for JSON that is nested too deeply, without parsing it."""
    depth, quoted, escaped = 0, False, False
    for letter in source:
        if quoted:
            if escaped:
                escaped = False
            elif letter == "\\":
                escaped = True
            elif letter == '"':
                quoted = False
        elif letter == '"':
            quoted = True
        elif letter in "[{":
            depth += 1
            _check_depth(depth)
        elif letter in "]}":
            depth -= 1


def check_regex(pattern: str) -> None:
    """Raise RefusedGrammarError for a regex that is too large, or that no automaton matches."""
    check_size(pattern, MAX_REGEX_BYTES)
    # Sizes of what stands at each open group's level, and of the atom before the place.
    sizes, last, place = [0], 0, 0
    while place < len(pattern):
        letter = pattern[place]
        match letter:
            case "\\":
                _refuse_escape(pattern, place)
                sizes[-1] += 1
                last, place = 1, place + 2
            case "[":
                place = _class_end(pattern, place)
                sizes[-1] += 1
                last = 1
            case "(":
                _refuse_group(pattern, place)
                sizes.append(0)
                _check_depth(len(sizes) - 1)
                last, place = 0, place + 1
            case ")" if len(sizes) > 1:
                last = max(sizes.pop(), 1)
                sizes[-1] += last
                place += 1
            case "{" if found := _COUNT.match(pattern, place):
                times = _times(found)
                sizes[-1] += last * (times - 1)
                last *= times
                place = found.end()
            case _:
                sizes[-1] += 1
                last, place = 1, place + 1
        if sizes[-1] > MAX_REPEATS:
            raise RefusedGrammarError(
                f"the regex repeats its parts {sizes[-1]} times in all; {MAX_REPEATS} are allowed"
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
            raise RefusedGrammarError(f"{asked!r} outside of a character class is not supported")
        place += width


def check_ebnf(source: str) -> None:
    """Raise RefusedGrammarError for a grammar with too many rules or too deep groups."""
    rules = len(_RULE.findall(source))
    if rules > MAX_RULES:
        raise RefusedGrammarError(f"it has {rules} rules; {MAX_RULES} are allowed")
    depth, quoted, skipped = 0, "", False
    for letter in source:
        if skipped:
            skipped = False
        elif letter == "\\":
            skipped = True
        elif quoted:
            quoted = "" if letter == quoted else quoted
        elif letter in '"[':
            quoted = '"' if letter == '"' else "]"
        elif letter == "(":
            depth += 1
            _check_depth(depth)
        elif letter == ")":
            depth -= 1
    for found in _COUNT.finditer(source):
        _times(found)


def _check_depth(depth: int) -> None:
    if depth > MAX_NESTING:
        raise RefusedGrammarError(f"it is nested more than {MAX_NESTING} levels deep")


def _times(found: re.Match[str]) -> int:
    digits = max(found[1], found[3], key=lambda text: (len(text), text)) or "1"
    if len(digits) > _LONGEST_COUNT or int(digits) > MAX_REPEATS:
        raise RefusedGrammarError(f"{found[0]} repeats too often; {MAX_REPEATS} times are allowed")
    return max(int(digits), 1)


def _refuse_escape(pattern: str, place: int) -> None:
    escape = pattern[place : place + 2]
    if escape[1:].isdigit() and escape != "\\0":
        raise RefusedGrammarError(f"the regex refers back with {escape}, which is not supported")
    if escape in {"\\b", "\\B", "\\k"}:
        raise RefusedGrammarError(f"the regex uses {escape}, which is not supported")


def _refuse_group(pattern: str, place: int) -> None:
    for opening, name in (
        ("(?=", "lookahead"),
        ("(?!", "lookahead"),
        ("(?<=", "lookbehind"),
        ("(?<!", "lookbehind"),
    ):
        if pattern.startswith(opening, place):
            raise RefusedGrammarError(f"the regex uses {name} ({opening}), which is not supported")


def _class_end(pattern: str, place: int) -> int:
    """Return the place behind the character class that opens at `place`."""
    place += 1
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1

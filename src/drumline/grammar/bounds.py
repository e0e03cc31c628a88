"""What a client's grammar may cost, checked before anything compiles it.

Compilers take time and memory that grow much faster than what they are given;
these limits keep away what is known to be hopeless. What passes them may still be
slow: that is bounded where it runs.
"""

import re

MAX_SOURCE_BYTES = 64 * 1024
MAX_REGEX_BYTES = 4 * 1024
MAX_NESTING = 64
MAX_REPEATS = 10_000
"""Times the atoms of a regex may be repeated, nested repeats multiplied."""
MAX_CHOICES = 4096
MAX_RULES = 1024

COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
"""A count behind an atom, as regexes and grammars write it."""
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
    for found in COUNT.finditer(source):
        times(found)


def _check_depth(depth: int) -> None:
    if depth > MAX_NESTING:
        raise RefusedGrammarError(f"it is nested more than {MAX_NESTING} levels deep")


def times(found: re.Match[str]) -> tuple[int, int | None]:
    """Return how often a count repeats, None without a most. Raises for one that is too large."""
    for digits in (found[1], found[3]):
        if len(digits) > _LONGEST_COUNT or int(digits or 0) > MAX_REPEATS:
            raise RefusedGrammarError(
                f"{found[0]} repeats too often; {MAX_REPEATS} times are allowed"
            )
    least = int(found[1] or 0)
    if not found[2]:
        return least, least
    return least, int(found[3]) if found[3] else None

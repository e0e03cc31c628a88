r"""Schemas whose patterns llguidance would match by another idea of white space.

To its `\s` U+0085 is white space and U+FEFF is none; to the language of JSON Schema's
patterns it is the other way around. What would match texts that do not validate is refused.
"""

from collections.abc import Iterator
from typing import Any

from drumline.grammar.schema.words import refused

_VALUES = {"const", "enum", "default", "examples"}
"""Keywords of which nothing within is a schema."""


def check_white_space(schema: Any) -> None:
    r"""Raise RefusedGrammarError, naming the place, for a pattern with `\s` or `\S` in a schema."""
    for at, pattern in _patterns(schema, "#"):
        place = 0
        while (place := pattern.find("\\", place)) >= 0:
            if pattern[place + 1 : place + 2] in {"s", "S"}:
                why = (
                    f"{pattern[place : place + 2]} is not supported with llguidance, to which "
                    r"other characters are white space; name those that are meant: [ \t\r\n]"
                )
                raise refused(at, why)
            place += 2


def _patterns(schema: Any, at: str) -> Iterator[tuple[str, str]]:
    """Return where the patterns in a schema stand, each with its text."""
    if isinstance(schema, list):
        for place, part in enumerate(schema):
            yield from _patterns(part, f"{at}/{place}")
    elif isinstance(schema, dict):
        for word, value in schema.items():
            if word == "pattern" and isinstance(value, str):
                yield f"{at}/{word}", value
            elif word == "patternProperties" and isinstance(value, dict):
                yield from ((f"{at}/{word}", name) for name in value)
            if word not in _VALUES:
                yield from _patterns(value, f"{at}/{word}")

r"""Schemas whose patterns llguidance would match by another idea of white space.

To its `\s` U+0085 is white space and U+FEFF is none; to the language of JSON Schema's
patterns it is the other way around. What would match texts that do not validate is refused.
"""

from collections.abc import Iterator
from typing import Any

from drumline.grammar.bounds import RefusedGrammarError

_VALUES = {"const", "enum", "default", "examples"}
"""Keywords of which nothing within is a schema."""


def check_white_space(schema: Any) -> None:
    r"""Raise RefusedGrammarError for a pattern with `\s` or `\S` in a schema."""
    for word, pattern in _patterns(schema):
        place = 0
        while (place := pattern.find("\\", place)) >= 0:
            if pattern[place + 1 : place + 2] in {"s", "S"}:
                raise RefusedGrammarError(
                    f"{word} with {pattern[place : place + 2]} is not supported with llguidance, "
                    "to which other characters are white space; name those that are meant, "
                    r"such as [ \t\r\n]"
                )
            place += 2


def _patterns(schema: Any) -> Iterator[tuple[str, str]]:
    """Return the patterns in a schema, each with its keyword."""
    if isinstance(schema, list):
        for part in schema:
            yield from _patterns(part)
    elif isinstance(schema, dict):
        for word, value in schema.items():
            if word == "pattern" and isinstance(value, str):
                yield word, value
            elif word == "patternProperties" and isinstance(value, dict):
                yield from ((word, name) for name in value)
            if word not in _VALUES:
                yield from _patterns(value)

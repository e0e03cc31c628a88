"""The language's keywords: which are honoured, what their values must be, what values are of.

It knows single keywords, not what several of them mean together.
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from drumline.core.errors import excerpt, quoted
from drumline.grammar.bounds import RefusedGrammarError

Schema = dict[str, Any]
"""A schema that is an object, as its writer wrote it or as a compiler gets it."""

MAX_COUNT = 100_000
"""Largest length, item or property count a schema may name."""
MAX_NUMBER = 1 << 53

NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": NUMERIC,
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
    "array": (
        "items",
        "prefixItems",
        "contains",
        "minContains",
        "maxContains",
        "minItems",
        "maxItems",
        "uniqueItems",
    ),
    "integer": NUMERIC,
    "boolean": (),
    "null": (),
}
"""The types, and the keywords that say something of their values alone."""
FLAT = frozenset({"type", "enum", "const", *(word for words in OF_TYPE.values() for word in words)})
"""Keywords that say something by themselves."""
ALTERNATIVES = ("$ref", "anyOf", "oneOf")
"""Keywords that can be written as they are where nothing else is asserted beside them."""
COMPOUND = frozenset(
    {
        *ALTERNATIVES,
        "allOf",
        "not",
        "if",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedItems",
        "unevaluatedProperties",
        "additionalItems",
    }
)
"""Keywords that are resolved into the others."""
_NOT_HONOURED = (
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$anchor",
)
_JSON_TYPES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
    type(None): "null",
}


class NothingFitsError(RefusedGrammarError):
    """A schema that no value fits. As one of several alternatives it may be left out."""


def refused(at: str, why: str) -> RefusedGrammarError:
    """Return the refusal of what stands at `at`."""
    return RefusedGrammarError(f"at {excerpt(at)}: {why}")


def nothing_fits(at: str, why: str) -> NothingFitsError:
    """Return the refusal of what no value fits."""
    return NothingFitsError(f"at {excerpt(at)}: {why}")


def check_honoured(schema: Schema, at: str) -> None:
    """Raise RefusedGrammarError if a keyword is not known how to honour."""
    for word in _NOT_HONOURED:
        if word in schema:
            raise refused(at, f"the keyword {word} is not supported")
    if at != "#" and isinstance(schema.get("$id"), str):
        # Any other was read before, see `references`.
        raise refused(at, "the keyword $id beside $ref or in no place of a schema is not supported")


def listed(schema: Schema, word: str, at: str) -> list[Any]:
    """Return the entries of a keyword that is a list of at least one."""
    parts = schema[word]
    if not isinstance(parts, list) or not parts:
        raise refused(at, f"{word} is a list of at least one entry")
    return parts


def mapped(schema: Schema, word: str, at: str) -> dict[str, Any]:
    """Return the entries of a keyword that maps names."""
    parts = schema.get(word, {})
    if not isinstance(parts, dict):
        raise refused(at, f"{word} maps names")
    return parts


def names(value: Any, word: str, at: str) -> list[str]:
    """Return a list of names."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refused(at, f"{word} is a list of names")
    return value


def types_of(schema: Schema, at: str) -> list[str] | None:
    """Return the types that `type` permits; None without one."""
    if "type" not in schema:
        return None
    asked = schema["type"]
    types = asked if isinstance(asked, list) else [asked]
    if not types or not all(isinstance(type_, str) and type_ in OF_TYPE for type_ in types):
        raise refused(at, f"type is {quoted(asked)}; types are {', '.join(OF_TYPE)}")
    return list(dict.fromkeys(types))


def count(schema: Mapping[str, Any], word: str, at: str) -> int | None:
    """Return the value of a keyword that counts; None without it."""
    value = schema.get(word)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise refused(at, f"{word} is {quoted(value)}; it is a whole number")
    if not 0 <= value <= MAX_COUNT:
        raise refused(at, f"{word} is {value}; 0 to {MAX_COUNT} are supported")
    return int(value)


def counts(
    schema: Mapping[str, Any], lower: str, upper: str, at: str
) -> tuple[int | None, int | None]:
    """Return the values of two keywords that count, of which the first is not above the other."""
    least, most = count(schema, lower, at), count(schema, upper, at)
    check_order(least, most, lower, upper, at)
    return least, most


def check_order(least: float | None, most: float | None, lower: str, upper: str, at: str) -> None:
    """Raise NothingFitsError if a lower bound is above an upper one."""
    if least is not None and most is not None and least > most:
        raise nothing_fits(at, f"{lower} {least} is above {upper} {most}")


def bound(schema: Schema, word: str, at: str) -> float | None:
    """Return the value of a keyword that bounds numbers; None without it."""
    value = schema.get(word)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(at, f"{word} is {quoted(value)}; it is a number")
    if not abs(value) <= MAX_NUMBER:  # true of a NaN, too
        raise refused(at, f"{word} is beyond 2^53, which is not supported")
    return value


def present(**words: int | None) -> Schema:
    """Return the words that have a value."""
    return {word: value for word, value in words.items() if value is not None}


def value_types(value: Any) -> set[str]:
    """Return the types that a JSON value is of."""
    type_ = _JSON_TYPES[type(value)]
    if type_ == "number" and float(value).is_integer():
        return {"number", "integer"}
    return {type_, "number"} if type_ == "integer" else {type_}


def identity(value: Any) -> Hashable:
    """Return what equal JSON values share, and others do not: 1 is 1.0, and neither is true."""
    if isinstance(value, dict):
        return ("object", frozenset((name, identity(part)) for name, part in value.items()))
    if isinstance(value, list):
        return ("array", tuple(map(identity, value)))
    if isinstance(value, float) and value.is_integer():
        return ("number", int(value))
    return ("number" if "number" in value_types(value) else _JSON_TYPES[type(value)], value)


def leaves(value: Any) -> Iterator[Any]:
    """Return what a JSON value holds that holds nothing itself."""
    if isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part)
    else:
        yield value

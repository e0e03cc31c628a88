"""Flat schemas of one type, as a compiler gets them.

What is left open is closed in one way: an object that names properties has no others
unless it says so. Whatever matches what is written is valid by the schema that was given;
not all that is valid matches.
"""

import math
from collections.abc import Callable
from typing import Any

from drumline.core.errors import quoted
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.regexes import check_pattern, check_regex
from drumline.grammar.schema.meeting import both
from drumline.grammar.schema.words import (
    MAX_NUMBER,
    NUMERIC,
    OF_TYPE,
    NothingFitsError,
    Schema,
    bound,
    check_order,
    count,
    counts,
    leaves,
    listed,
    mapped,
    names,
    nothing_fits,
    present,
    refused,
    types_of,
    value_types,
)

Write = Callable[[Any, str], Schema]
"""Writes a schema within this one."""

MAX_MULTIPLE = 100
"""Largest number that integers may be multiples of: a compiler keeps a state for each remainder."""
_MAX_LISTED = 1000
_FORMATS = frozenset(
    {
        "duration",
        "email",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "uuid",
    }
)
_NARROWER = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri-reference",
}
"""Formats of which another one's values are part."""
_DATE = (
    "[0-9]{4}-((01|03|05|07|08|10|12)-(0[1-9]|[12][0-9]|3[01])"
    "|(04|06|09|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
    "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": r"^[a-z0-9]{1,30}(\.[a-z0-9]{1,30}){0,6}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "ipv6": "^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
}
"""Formats of which only values are allowed that are right by every reader: no February 29 and
no leap second, which may not exist, no host names that encode others, no octal addresses."""


def types_meant(flat: Schema, at: str) -> list[str]:
    """Return the types that a flat schema is written for; none if it says nothing.

    Without `type`, other types would match whatever they hold; the keywords say which are meant.
    """
    asked = types_of(flat, at)
    if asked is not None:
        return asked
    return [
        type_
        for type_, words in OF_TYPE.items()
        if type_ != "integer" and any(word in flat for word in words)
    ]


def written(type_: str, flat: Schema, at: str, write: Write) -> Schema:
    """Return a flat schema's values of one type."""
    match type_:
        case "string":
            return _string(flat, at)
        case "integer":
            return _integer(flat, at)
        case "number":
            return _number(flat, at)
        case "object":
            return _object(flat, at, write)
        case "array":
            return _array(flat, at, write)
    return {"type": type_}


# Values


def values(flat: Schema, at: str) -> Schema:
    """Return the values of a flat schema's enum that the keywords beside it permit."""
    kept = [value for value in listed(flat, "enum", at) if _admits(flat, value, at)]
    if not kept:
        raise nothing_fits(at, "no value of enum fits what stands beside it")
    for number in (each for value in kept for each in leaves(value)):
        if isinstance(number, int | float) and not abs(number) <= MAX_NUMBER:
            raise refused(at, "enum with numbers beyond 2^53 is not supported")
    return {"enum": kept}


def _admits(flat: Schema, value: Any, at: str) -> bool:
    types = value_types(value)
    asked = types_of(flat, at)
    if asked is not None and not types & set(asked):
        return False
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _admits_number(flat, value, at)
    for type_ in types:
        for word in OF_TYPE[type_]:
            if word in flat and not _admits_word(flat, word, value, at):
                return False
    return True


def _admits_number(flat: Schema, value: float, at: str) -> bool:
    if "multipleOf" in flat:
        raise refused(at, "enum beside multipleOf is not supported")
    low, high = bound(flat, "minimum", at), bound(flat, "maximum", at)
    above, below = bound(flat, "exclusiveMinimum", at), bound(flat, "exclusiveMaximum", at)
    return (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
        and (below is None or value < below)
    )


def _admits_word(flat: Schema, word: str, value: Any, at: str) -> bool:
    if word == "required":
        return all(name in value for name in names(flat[word], word, at))
    if not word.startswith(("min", "max")) or word.endswith("Contains"):
        raise refused(at, f"enum beside {word} is not supported")
    limit = count(flat, word, at)
    assert limit is not None
    return len(value) >= limit if word.startswith("min") else len(value) <= limit


# Strings and numbers


def _string(flat: Schema, at: str) -> Schema:
    done: Schema = {"type": "string"}
    least, most = counts(flat, "minLength", "maxLength", at)
    used: list[str] = [word for word in ("pattern", "format") if word in flat]
    if least is not None or most is not None:
        used.append("minLength and maxLength")
    if len(used) > 1:
        raise refused(at, f"{' together with '.join(used)} is not supported")
    if "pattern" in flat:
        done["pattern"] = _pattern(flat["pattern"], "pattern", at)
    elif "format" in flat:
        asked = flat["format"]
        name = _NARROWER.get(asked, asked) if isinstance(asked, str) else ""
        if name in _PATTERNS:
            done["pattern"] = _PATTERNS[name]
        elif name in _FORMATS:
            done["format"] = name
        else:
            known = ", ".join(sorted({*_FORMATS, *_PATTERNS, *_NARROWER}))
            raise refused(at, f"format {quoted(asked)} is not supported; {known} are")
    return done | present(minLength=least, maxLength=most)


def _pattern(pattern: Any, word: str, at: str) -> str:
    if not isinstance(pattern, str):
        raise refused(at, f"{word} is a regex")
    try:
        check_regex(pattern)
        check_pattern(pattern)
    except RefusedGrammarError as error:
        raise refused(at, f"{word}: {error}") from None
    # One compiler matches it as a whole, another anywhere in a string: then an answer that
    # began otherwise may never come to it.
    return pattern if "^" in pattern or "$" in pattern else f"^(?:{pattern})$"


def _integer(flat: Schema, at: str) -> Schema:
    lows, highs = [], []
    if (low := bound(flat, "minimum", at)) is not None:
        lows.append(math.ceil(low))
    if (low := bound(flat, "exclusiveMinimum", at)) is not None:
        lows.append(math.floor(low) + 1)
    if (high := bound(flat, "maximum", at)) is not None:
        highs.append(math.floor(high))
    if (high := bound(flat, "exclusiveMaximum", at)) is not None:
        highs.append(math.ceil(high) - 1)
    least, most = max(lows, default=None), min(highs, default=None)
    check_order(least, most, "the least integer", "the largest", at)
    step = _multiple(flat, at)
    if step is None:
        return {"type": "integer", **present(minimum=least, maximum=most)}
    if least is None and most is None:
        return {"type": "integer", "multipleOf": step}
    if least is None or most is None or (most - least) // step > _MAX_LISTED:
        raise refused(at, f"multipleOf with bounds apart by more than {_MAX_LISTED} steps")
    found = list(range(-(-least // step) * step, most + 1, step))
    if not found:
        raise nothing_fits(at, f"no multiple of {step} lies between the bounds")
    return {"enum": found}


def _multiple(flat: Schema, at: str) -> int | None:
    step = flat.get("multipleOf")
    if step is None:
        return None
    if isinstance(step, bool) or not isinstance(step, int | float) or step <= 0:
        raise refused(at, f"multipleOf is {quoted(step)}; it is a number above 0")
    if step != int(step) or step > MAX_MULTIPLE:
        raise refused(
            at, f"multipleOf {step} is not supported; whole numbers up to {MAX_MULTIPLE} are"
        )
    return int(step)


def _number(flat: Schema, at: str) -> Schema:
    if "multipleOf" in flat:
        return _integer(flat, at)
    done: Schema = {"type": "number"}
    limits = {word: limit for word in NUMERIC[:4] if (limit := bound(flat, word, at)) is not None}
    least = max((limits[w] for w in ("minimum", "exclusiveMinimum") if w in limits), default=None)
    most = min((limits[w] for w in ("maximum", "exclusiveMaximum") if w in limits), default=None)
    check_order(least, most, "the least number", "the largest", at)
    return done | limits


# Objects


def _object(flat: Schema, at: str, write: Write) -> Schema:
    declared = mapped(flat, "properties", at)
    required = names(flat.get("required", []), "required", at)
    if "patternProperties" in flat or "propertyNames" in flat:
        return _named_by_pattern(flat, at, write)
    others = flat.get("additionalProperties")
    properties: dict[str, Schema] = {}
    for name, part in declared.items():
        place = f"{at}/properties/{name}"
        try:
            properties[name] = write(part, place)
        except NothingFitsError:
            if name in required:
                raise
            if others not in (None, False):
                # Among the others it could come after all.
                raise refused(place, "nothing fits it, and additionalProperties permits it") from (
                    None
                )
    for name in required:
        if name not in properties:
            if others is False:
                raise nothing_fits(at, f"required names {quoted(name)}, which is no property")
            part = True if others is None else others
            properties[name] = write(part, f"{at}/additionalProperties")
    if others is None:
        others = not declared
    done: Schema = {"type": "object"}
    if properties:
        done["properties"] = properties
        done["required"] = [name for name in properties if name in required]
    done["additionalProperties"] = _others(others, at, write)
    return done | _sizes(flat, done, len(required), at)


def _others(others: Any, at: str, write: Write) -> Any:
    try:
        return others is not False and (write(others, f"{at}/additionalProperties") or True)
    except NothingFitsError:
        return False


def _sizes(flat: Schema, done: Schema, required: int, at: str) -> Schema:
    """Return how many properties there may be; compilers count names that repeat."""
    least, most = counts(flat, "minProperties", "maxProperties", at)
    declared, closed = len(done.get("properties", ())), done["additionalProperties"] is False
    if least is not None and least <= required:
        least = None
    if least is not None and closed and least > declared:
        raise nothing_fits(at, f"minProperties {least} above the {declared} there are")
    if least is not None and not closed and least > required + (1 if required == declared else 0):
        raise refused(at, f"minProperties {least} of names that are not declared is not supported")
    if most is not None and most < required:
        raise nothing_fits(at, f"maxProperties {most} below the {required} required ones")
    return present(minProperties=least, maxProperties=most)


def _named_by_pattern(flat: Schema, at: str, write: Write) -> Schema:
    """Return an object whose names match one pattern."""
    declared = mapped(flat, "properties", at)
    patterns = mapped(flat, "patternProperties", at)
    word = "patternProperties" if patterns else "propertyNames"
    if "propertyNames" in flat:
        if patterns:
            raise refused(at, "propertyNames beside patternProperties is not supported")
        named = flat["propertyNames"]
        if isinstance(named, bool):
            rest = {key: value for key, value in flat.items() if key != "propertyNames"}
            return _object(rest | ({} if named else {"maxProperties": 0}), at, write)
        patterns = {_names_pattern(named, at): flat.get("additionalProperties", True)}
    elif flat.get("additionalProperties", False) is not False:
        raise refused(at, "patternProperties beside additionalProperties is not supported")
    if declared or flat.get("required"):
        raise refused(at, f"{word} beside properties and required is not supported")
    if len(patterns) != 1:
        raise refused(at, "patternProperties with several patterns is not supported")
    ((pattern, part),) = patterns.items()
    done: Schema = {"type": "object", "additionalProperties": False}
    try:
        done["patternProperties"] = {
            _pattern(pattern, word, at): write(part, f"{at}/{word}/{pattern}")
        }
    except NothingFitsError:
        return done
    least, most = counts(flat, "minProperties", "maxProperties", at)
    if least is not None and least > 1:
        raise refused(at, f"minProperties {least} beside {word} is not supported")
    return done | present(minProperties=least, maxProperties=most)


def _names_pattern(named: Any, at: str) -> str:
    """Return the pattern of names that fit a schema."""
    place = f"{at}/propertyNames"
    if not isinstance(named, dict):
        raise refused(place, "a schema is an object or a boolean")
    words = set(named) - {"type"}
    if words == {"pattern"}:
        return str(_pattern(named["pattern"], "pattern", place))
    if words and words <= {"minLength", "maxLength"}:
        least, most = counts(named, "minLength", "maxLength", place)
        return f"^[a-zA-Z0-9_ -]{{{least or 0},{'' if most is None else most}}}$"
    raise refused(at, "propertyNames is supported with a pattern, or with lengths, alone")


# Arrays


def _array(flat: Schema, at: str, write: Write) -> Schema:
    prefix, items = flat.get("prefixItems", []), flat.get("items", True)
    if "prefixItems" in flat and (not isinstance(prefix, list) or not prefix):
        raise refused(at, "prefixItems is a list of schemas")
    least, most = counts(flat, "minItems", "maxItems", at)
    if "contains" in flat:
        prefix, needed = _with_contained(flat, prefix, items, at)
        least = max(least or 0, needed)
        check_order(least, most, "the items that contains asks for", "maxItems", at)
    done: Schema = {"type": "array"}
    first: list[Schema] = []
    for index, part in enumerate(prefix):
        try:
            first.append(write(part, f"{at}/prefixItems/{index}"))
        except NothingFitsError:
            # No array is as long as that.
            items = False
            break
    rest = None
    if items is not False:
        try:
            rest = write(items, f"{at}/items")
        except NothingFitsError:
            items = False
    if items is False:
        if least is not None and least > len(first):
            raise nothing_fits(at, f"minItems {least} above the {len(first)} items there are")
        most = len(first) if most is None else min(most, len(first))
    if flat.get("uniqueItems") is True and (most is None or most > 1):
        raise refused(at, "the keyword uniqueItems is not supported")
    if first:
        done["prefixItems"] = first
    if rest is not None:
        done["items"] = rest
    elif first:
        done["items"] = False
    return done | present(minItems=least, maxItems=most)


def _with_contained(flat: Schema, prefix: Any, items: Any, at: str) -> tuple[list[Any], int]:
    """Return the first items with what an array contains among them, and how many there are."""
    least, most = counts(flat, "minContains", "maxContains", at)
    needed = 1 if least is None else least
    if most is not None:
        raise refused(at, "the keyword maxContains is not supported")
    longer = [*prefix, *[items] * (needed - len(prefix))]
    return [
        both(part, flat["contains"]) if index < needed else part
        for index, part in enumerate(longer)
    ], needed

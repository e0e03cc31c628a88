"""JSON schemas: what is honoured, and how it is written for a compiler.

A compiler ignores much of what it does not know, and then produces what its schema
forbids. So a schema is written anew from what is honoured, every keyword that asserts
something else is refused by its name, and what is left open is closed in one way:
an object that names properties has no others unless it says so. Whatever matches the
result is valid by the schema that was given; not all that is valid matches.

Keywords that are none of the language are ignored, as the language asks.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from drumline.grammar.bounds import (
    RefusedGrammarError,
    check_json_nesting,
    check_pattern,
    check_regex,
    check_size,
)

Schema = dict[str, Any]

MAX_DEFINITIONS = 512
MAX_COUNT = 100_000
"""Largest length, item or property count a schema may name."""
_MAX_NUMBER = 1 << 53

_NOT_HONOURED = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "multipleOf",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$anchor",
)
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "minProperties",
        "maxProperties",
    ),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "boolean": (),
    "null": (),
}
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords that decide by themselves: beside one, nothing else may assert anything."""
_ASSERTING = frozenset({"type", *_ALONE, *(word for words in _OF_TYPE.values() for word in words)})
_FORMATS = frozenset(
    {
        "duration",
        "email",
        "ipv4",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "uuid",
    }
)
_DATE = (
    "[0-9]{4}-((01|03|05|07|08|10|12)-(0[1-9]|[12][0-9]|3[01])"
    "|(04|06|09|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
    "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": r"^[a-z0-9]{1,30}(\.[a-z0-9]{1,30}){0,6}$",
    "ipv6": "^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
}
"""Formats of which only values are allowed that are right by every reader: no February 29 and
no leap second, which may not exist, no host names that encode others."""
_JSON_TYPES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
    type(None): "null",
}


def rewritten(source: str) -> str:
    """Return the JSON schema `source` as a compiler gets it.

    Raises RefusedGrammarError naming the keyword, and where it stands, that is not honoured.
    """
    check_size(source)
    check_json_nesting(source)
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RefusedGrammarError(f"it is no JSON: {error}") from None
    return rewritten_value(schema)


def rewritten_value(schema: Any) -> str:
    """Return a decoded JSON schema as a compiler gets it; see `rewritten`."""
    return json.dumps(_Writer(schema).whole(), ensure_ascii=False, separators=(",", ":"))


class _Writer:
    """One schema's rewriting."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Schema] = {}

    def whole(self) -> Schema:
        written = self._write(self._root, "#")
        return {**written, "$defs": self._definitions} if self._definitions else written

    def _write(self, schema: Any, at: str) -> Schema:
        if schema is True:
            return {}
        if schema is False:
            raise _refused(at, "a schema of `false` permits nothing")
        if not isinstance(schema, dict):
            raise _refused(at, "a schema is an object or a boolean")
        _refuse_unhonoured(schema, at)
        if at != "#" and isinstance(schema.get("$id"), str):
            raise _refused(at, "$id below the root is not supported")
        deciding = [word for word in _ALONE if word in schema]
        if not deciding:
            return self._write_typed(schema, at)
        word = deciding[0]
        beside = sorted((schema.keys() & _ASSERTING) - {word})
        if beside and not (word in {"enum", "const"} and beside == ["type"]):
            raise _refused(at, f"{word} beside {', '.join(beside)} is not supported")
        match word:
            case "$ref":
                return self._reference(schema["$ref"], at)
            case "enum" | "const":
                return _values(schema, word, at)
            case "allOf":
                parts = _list(schema, word, at)
                if len(parts) != 1:
                    raise _refused(at, "allOf of several schemas is not supported")
                return self._write(parts[0], f"{at}/allOf/0")
        parts = [
            self._write(part, f"{at}/{word}/{index}")
            for index, part in enumerate(_list(schema, word, at))
        ]
        if word == "oneOf":
            self._check_exclusive(parts, at)
        return {"anyOf": parts}

    # One type at a time

    def _write_typed(self, schema: Schema, at: str) -> Schema:
        types = self._types(schema, at)
        if types is None:
            return {}
        parts = [self._of_type(type_, schema, at) for type_ in types]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _types(self, schema: Schema, at: str) -> list[str] | None:
        """Return the types a schema permits; None for all of them."""
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if not types or not all(isinstance(t, str) and t in _OF_TYPE for t in types):
                raise _refused(at, f"type is {schema['type']!r}; types are {', '.join(_OF_TYPE)}")
            return list(dict.fromkeys(types))
        # Other types would match whatever they hold; the keyword says which one is meant.
        types = [
            type_
            for type_, words in _OF_TYPE.items()
            if type_ != "integer" and any(word in schema for word in words)
        ]
        return types or None

    def _of_type(self, type_: str, schema: Schema, at: str) -> Schema:
        match type_:
            case "string":
                return _string(schema, at)
            case "integer":
                return _integer(schema, at)
            case "number":
                return _number(schema, at)
            case "object":
                return self._object(schema, at)
            case "array":
                return self._array(schema, at)
        return {"type": type_}

    def _object(self, schema: Schema, at: str) -> Schema:
        declared = schema.get("properties", {})
        if not isinstance(declared, dict):
            raise _refused(at, "properties maps names to schemas")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _refused(at, "required is a list of names")
        others = schema.get("additionalProperties", not declared)
        written: Schema = {"type": "object"}
        properties = {}
        for name, part in declared.items():
            if part is False:
                # Closed to others, the object cannot have it anyway.
                if others is not False or name in required:
                    raise _refused(f"{at}/properties/{name}", "a schema of `false` permits nothing")
                continue
            properties[name] = self._write(part, f"{at}/properties/{name}")
        for name in required:
            if name not in properties:
                if others is False:
                    raise _refused(at, f"required names {name!r}, which is no property")
                properties[name] = self._write(others, f"{at}/additionalProperties")
        if properties:
            written["properties"] = properties
            written["required"] = [name for name in properties if name in required]
        written["additionalProperties"] = (
            False if others is False else self._write(others, f"{at}/additionalProperties") or True
        )
        least, most = _counts(schema, "minProperties", "maxProperties", at)
        if least is not None and others is False and least > len(properties):
            raise _refused(at, f"minProperties {least} above the {len(properties)} there are")
        if most is not None and most < len(required):
            raise _refused(at, f"maxProperties {most} below the {len(required)} required ones")
        return {**written, **_present(minProperties=least, maxProperties=most)}

    def _array(self, schema: Schema, at: str) -> Schema:
        prefix, items = schema.get("prefixItems"), schema.get("items", True)
        if isinstance(items, list):
            prefix, items = items, schema.get("additionalItems", True)
        elif "additionalItems" in schema and prefix is not None:
            raise _refused(at, "additionalItems beside prefixItems is not supported")
        written: Schema = {"type": "array"}
        least, most = _counts(schema, "minItems", "maxItems", at)
        listed = 0
        if prefix is not None:
            if not isinstance(prefix, list) or not prefix:
                raise _refused(at, "prefixItems is a list of schemas")
            listed = len(prefix)
            written["prefixItems"] = [
                self._write(part, f"{at}/prefixItems/{i}") for i, part in enumerate(prefix)
            ]
        if items is False:
            if least is not None and least > listed:
                raise _refused(at, f"minItems {least} above the {listed} items there are")
            most = listed if most is None else min(most, listed)
        else:
            written["items"] = self._write(items, f"{at}/items")
        if items is False and listed:
            written["items"] = False
        return {**written, **_present(minItems=least, maxItems=most)}

    # References

    def _reference(self, pointer: Any, at: str) -> Schema:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise _refused(at, f"$ref {pointer!r}: only references into the schema are supported")
        self._refuse_cycle(pointer, at)
        name = self._names.get(pointer)
        if name is None:
            if len(self._names) >= MAX_DEFINITIONS:
                raise _refused(at, f"$ref: more than {MAX_DEFINITIONS} definitions are in use")
            name = f"d{len(self._names)}"
            self._names[pointer] = name
            self._definitions[name] = {}
            target = self._resolve(pointer, at)
            # A definition has the place of the root: `$id` is refused in either.
            self._definitions[name] = self._write(target, pointer)
        return {"$ref": f"#/$defs/{name}"}

    def _refuse_cycle(self, pointer: str, at: str) -> None:
        seen: set[str] = set()
        while pointer not in seen:
            seen.add(pointer)
            target = self._resolve(pointer, at)
            if not isinstance(target, dict) or not isinstance(target.get("$ref"), str):
                return
            pointer = target["$ref"]
            if not pointer.startswith("#"):
                return
        raise _refused(at, f"$ref {pointer!r} leads back to itself")

    def _resolve(self, pointer: str, at: str) -> Any:
        found = self._root
        for step in pointer.split("/")[1:]:
            key = _unescaped(step)
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise _refused(at, f"$ref {pointer!r}: there is no such schema")
        return found

    # Exclusive alternatives

    def _check_exclusive(self, parts: list[Schema], at: str) -> None:
        """Raise unless no value matches two of `parts`: a grammar matches any of them."""
        for index, left in enumerate(parts):
            for right in parts[:index]:
                if not self._exclusive(left, right):
                    raise _refused(
                        at,
                        "oneOf is supported only where its schemas are of different types or "
                        "differ in a required property with const or enum",
                    )

    def _exclusive(self, left: Schema, right: Schema) -> bool:
        left, right = self._target(left), self._target(right)
        if "anyOf" in left:
            return all(self._exclusive(part, right) for part in left["anyOf"])
        if "anyOf" in right:
            return all(self._exclusive(left, part) for part in right["anyOf"])
        if "enum" in left and "enum" in right:
            return not any(_equal(a, b) for a in left["enum"] for b in right["enum"])
        kinds = _kinds(left) & _kinds(right)
        if not kinds:
            return True
        if left.get("type") == right.get("type") == "object":
            shared = set(left.get("required", ())) & set(right.get("required", ()))
            return any(
                "enum" in (a := self._target(left["properties"][name]))
                and "enum" in (b := self._target(right["properties"][name]))
                and self._exclusive(a, b)
                for name in shared
            )
        return False

    def _target(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._definitions[schema["$ref"].rpartition("/")[2]]
        return schema


def _refused(at: str, why: str) -> RefusedGrammarError:
    return RefusedGrammarError(f"at {at}: {why}")


def _refuse_unhonoured(schema: Schema, at: str) -> None:
    for word in _NOT_HONOURED:
        if word in schema and not (word == "uniqueItems" and schema[word] is False):
            raise _refused(at, f"the keyword {word} is not supported")


def _list(schema: Schema, word: str, at: str) -> list[Any]:
    parts = schema[word]
    if not isinstance(parts, list) or not parts:
        raise _refused(at, f"{word} is a list of at least one entry")
    return parts


def _values(schema: Schema, word: str, at: str) -> Schema:
    values = [schema["const"]] if word == "const" else _list(schema, "enum", at)
    types = schema.get("type")
    if types is not None:
        types = types if isinstance(types, list) else [types]
        values = [value for value in values if _types_of(value) & set(types)]
        if not values:
            raise _refused(at, f"no value of {word} is of the type asked for")
    if any(isinstance(number, float) for value in values for number in _leaves(value)):
        raise _refused(at, f"{word} with numbers that are no integers is not supported")
    return {"enum": values}


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _types_of(value: Any) -> set[str]:
    type_ = _JSON_TYPES[type(value)]
    return {type_, "number"} if type_ == "integer" else {type_}


def _kinds(schema: Schema) -> set[str]:
    """Return the kinds of values a written schema may match, integers counted as numbers."""
    if "enum" in schema:
        types = {_JSON_TYPES[type(value)] for value in schema["enum"]}
    else:
        types = {schema["type"]} if "type" in schema else set(_OF_TYPE)
    return {"number" if type_ == "integer" else type_ for type_ in types}


def _equal(left: Any, right: Any) -> bool:
    return _types_of(left) == _types_of(right) and left == right


def _count(schema: Mapping[str, Any], word: str, at: str) -> int | None:
    value = schema.get(word)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise _refused(at, f"{word} is {value!r}; it is a whole number")
    if not 0 <= value <= MAX_COUNT:
        raise _refused(at, f"{word} is {value}; 0 to {MAX_COUNT} are supported")
    return int(value)


def _counts(
    schema: Mapping[str, Any], lower: str, upper: str, at: str
) -> tuple[int | None, int | None]:
    least, most = _count(schema, lower, at), _count(schema, upper, at)
    _check_order(least, most, lower, upper, at)
    return least, most


def _present(**words: int | None) -> Schema:
    return {word: value for word, value in words.items() if value is not None}


def _check_order(least: float | None, most: float | None, lower: str, upper: str, at: str) -> None:
    if least is not None and most is not None and least > most:
        raise _refused(at, f"{lower} {least} is above {upper} {most}")


def _string(schema: Schema, at: str) -> Schema:
    written: Schema = {"type": "string"}
    least, most = _counts(schema, "minLength", "maxLength", at)
    used: list[str] = [word for word in ("pattern", "format") if word in schema]
    if least is not None or most is not None:
        used.append("minLength and maxLength")
    if len(used) > 1:
        raise _refused(at, f"{' together with '.join(used)} is not supported")
    if "pattern" in schema:
        pattern = schema["pattern"]
        if not isinstance(pattern, str):
            raise _refused(at, "pattern is a regex")
        try:
            check_regex(pattern)
            check_pattern(pattern)
        except RefusedGrammarError as refused:
            raise _refused(at, f"pattern: {refused}") from None
        written["pattern"] = pattern
    elif "format" in schema:
        name = schema["format"]
        if isinstance(name, str) and name in _PATTERNS:
            written["pattern"] = _PATTERNS[name]
        elif isinstance(name, str) and name in _FORMATS:
            written["format"] = name
        else:
            known = ", ".join(sorted({*_FORMATS, *_PATTERNS}))
            raise _refused(at, f"format {name!r} is not supported; {known} are")
    written |= _present(minLength=least, maxLength=most)
    return written


def _bound(schema: Schema, word: str, at: str) -> float | None:
    value = schema.get(word)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refused(at, f"{word} is {value!r}; it is a number")
    if abs(value) > _MAX_NUMBER:
        raise _refused(at, f"{word} is beyond 2^53, which is not supported")
    return value


def _integer(schema: Schema, at: str) -> Schema:
    lows = [
        math.ceil(low) if (low := _bound(schema, "minimum", at)) is not None else None,
        math.floor(low) + 1
        if (low := _bound(schema, "exclusiveMinimum", at)) is not None
        else None,
    ]
    highs = [
        math.floor(high) if (high := _bound(schema, "maximum", at)) is not None else None,
        math.ceil(high) - 1
        if (high := _bound(schema, "exclusiveMaximum", at)) is not None
        else None,
    ]
    least = max((low for low in lows if low is not None), default=None)
    most = min((high for high in highs if high is not None), default=None)
    _check_order(least, most, "the least integer", "the largest", at)
    written: Schema = {"type": "integer"}
    if least is not None:
        written["minimum"] = least
    if most is not None:
        written["maximum"] = most
    return written


def _number(schema: Schema, at: str) -> Schema:
    written: Schema = {"type": "number"}
    for word in _OF_TYPE["number"]:
        bound = _bound(schema, word, at)
        if bound is not None:
            written[word] = bound
    return written


def _unescaped(step: str) -> str:
    """Return a step of a JSON pointer as the key it names."""
    parts = step.replace("~1", "/").replace("~0", "~").split("%")
    decoded = [parts[0]]
    for part in parts[1:]:
        try:
            decoded.append(chr(int(part[:2], 16)) + part[2:])
        except ValueError:
            decoded.append("%" + part)
    return "".join(decoded)

"""Several schemas that hold at once, as alternatives of one flat schema each.

A flat schema has keywords that say something by themselves, and no others. `allOf` and what
stands beside `$ref`, `anyOf` and `oneOf` are met keyword by keyword; an object of which one
part knows names that another does not is held to what the other says of unknown names.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

from drumline.core.errors import quoted
from drumline.grammar.schema.words import (
    FLAT,
    OF_TYPE,
    NothingFitsError,
    Schema,
    check_honoured,
    identity,
    listed,
    mapped,
    names,
    nothing_fits,
    refused,
    types_of,
    value_types,
)

MAX_ALTERNATIVES = 64
"""Flat schemas that one schema may come to."""
MAX_PARTS = 20_000
"""Schemas that are looked at for one, each as often as it comes to hold."""
_MAX_TRIGGERS = 4
"""Properties of one object that others depend on: each doubles the alternatives."""
_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains")

Resolve = Callable[[str, str], Any]
"""Returns the schema that a reference leads to; it is given where that stands, too."""


class Meeting:
    """Resolves one schema's compound keywords."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._open: list[str] = []
        self._parts_left = MAX_PARTS

    def alternatives(self, schema: Any, at: str) -> list[Schema]:
        """Return flat schemas of which a value fits at least one; never none.

        Raises NothingFitsError if no value fits, RefusedGrammarError for what is not supported.
        """
        self._parts_left -= 1
        if self._parts_left < 0:
            raise refused(at, f"its keywords come to more than {MAX_PARTS} schemas")
        if isinstance(schema, bool):
            if schema:
                return [{}]
            raise nothing_fits(at, "a schema of `false` permits nothing")
        if not isinstance(schema, dict):
            raise refused(at, "a schema is an object or a boolean")
        check_honoured(schema, at)
        found = [_flat(schema, at)]
        for part, place in self._parts(schema, at):
            found = _product(found, self.alternatives(part, place), at)
        if "$ref" in schema:
            found = _product(found, self._referred(schema["$ref"], at), at)
        if "anyOf" in schema:
            branches = self._branches(listed(schema, "anyOf", at), f"{at}/anyOf")
            found = _product(found, [flat for branch in branches for flat in branch], at)
        if "oneOf" in schema:
            found = self._exactly_one(found, listed(schema, "oneOf", at), at)
        found = [each for flat in found for each in self._by_presence(flat, schema, at)]
        if len(found) > MAX_ALTERNATIVES:
            raise _too_many(at)
        return [_closed(flat, schema) for flat in found]

    def _parts(self, schema: Schema, at: str) -> list[tuple[Any, str]]:
        """Return what holds beside a schema's flat keywords, with where it stands."""
        parts: list[tuple[Any, str]] = []
        if "allOf" in schema:
            each = listed(schema, "allOf", at)
            parts += [(part, f"{at}/allOf/{index}") for index, part in enumerate(each)]
        if "not" in schema:
            parts.append((_negated(schema["not"], at), f"{at}/not"))
        if "if" in schema:
            asked = schema["if"]
            if isinstance(asked, bool):
                word = "then" if asked else "else"
                parts.append((schema.get(word, True), f"{at}/{word}"))
            elif "then" in schema or "else" in schema:
                raise refused(at, "the keyword if is not supported")
        return parts

    def _referred(self, pointer: Any, at: str) -> list[Schema]:
        if pointer in self._open:
            raise refused(at, f"$ref {quoted(pointer)} beside other keywords leads back to itself")
        target = self._resolve(pointer, at)
        self._open.append(pointer)
        try:
            return self.alternatives(target, pointer)
        finally:
            self._open.pop()

    def _branches(self, parts: list[Any], at: str) -> list[list[Schema]]:
        """Return each part's alternatives, without the parts that nothing fits."""
        found: list[list[Schema]] = []
        nothing = None
        for index, part in enumerate(parts):
            try:
                found.append(self.alternatives(part, f"{at}/{index}"))
            except NothingFitsError as error:
                nothing = error
        if not found and nothing is not None:
            raise nothing
        return found

    def _exactly_one(self, beside: list[Schema], parts: list[Any], at: str) -> list[Schema]:
        """Return what fits one part and what holds beside; raises if it might fit two."""
        branches: list[list[Schema]] = []
        nothing = None
        for branch in self._branches(parts, f"{at}/oneOf"):
            try:
                branches.append(_product(beside, branch, at))
            except NothingFitsError as error:
                nothing = error
        if not branches and nothing is not None:
            raise nothing
        for left, right in itertools.combinations(branches, 2):
            if not all(self._exclusive(a, b, at) for a in left for b in right):
                raise refused(
                    at,
                    "oneOf is supported only where its schemas are of different types or "
                    "differ in a required property with const or enum",
                )
        return [flat for branch in branches for flat in branch]

    def _exclusive(self, left: Schema, right: Schema, at: str) -> bool:
        """Whether no value fits two flat schemas, as far as is seen without looking deeper."""
        if "enum" in left and "enum" in right:
            return {*map(identity, left["enum"])}.isdisjoint(map(identity, right["enum"]))
        mine, theirs = _kinds(left, at), _kinds(right, at)
        if mine is not None and theirs is not None and not mine & theirs:
            return True
        if mine == theirs == {"object"}:
            shared = {*left.get("required", ())} & {*right.get("required", ())}
            return any(
                self._enums_differ(
                    mapped(left, "properties", at).get(name, True),
                    mapped(right, "properties", at).get(name, True),
                    at,
                )
                for name in shared
            )
        return False

    def _enums_differ(self, left: Any, right: Any, at: str) -> bool:
        return all(
            "enum" in a and "enum" in b and self._exclusive(a, b, at)
            for a in self.alternatives(left, at)
            for b in self.alternatives(right, at)
        )

    def _by_presence(self, flat: Schema, schema: Schema, at: str) -> list[Schema]:
        """Return the alternatives with and without each property that others depend on."""
        needs = _dependencies(schema, at)
        if len(needs) > _MAX_TRIGGERS:
            raise refused(at, f"more than {_MAX_TRIGGERS} properties that others depend on")
        found = [flat]
        for name, need in needs.items():
            absent: Schema = {"properties": {name: False}}
            there = self.alternatives({"allOf": [{"required": [name]}, need]}, at)
            found = _product(found, [absent, *there], at)
        return found


def _kinds(flat: Schema, at: str) -> set[str] | None:
    """Return the kinds of values a flat schema fits, integers as numbers; None for all."""
    if "enum" in flat:
        types = {type_ for value in flat["enum"] for type_ in value_types(value)}
    elif (found := types_of(flat, at)) is not None:
        types = set(found)
    else:
        return None
    return {"number" if type_ == "integer" else type_ for type_ in types}


def _product(left: list[Schema], right: list[Schema], at: str) -> list[Schema]:
    """Return what meets of each pair; raises NothingFitsError when none does."""
    if len(left) * len(right) > MAX_ALTERNATIVES:
        raise _too_many(at)
    found: list[Schema] = []
    nothing = None
    for one, other in itertools.product(left, right):
        try:
            found.append(met(one, other, at))
        except NothingFitsError as error:
            nothing = error
    if not found and nothing is not None:
        raise nothing
    return found


def _too_many(at: str) -> Exception:
    return refused(at, f"its keywords come to more than {MAX_ALTERNATIVES} alternatives")


def _flat(schema: Schema, at: str) -> Schema:
    """Return the keywords that say something by themselves, each in its present-day form."""
    flat = {word: value for word, value in schema.items() if word in FLAT}
    if "const" in flat:
        value = flat.pop("const")
        if "enum" in flat and identity(value) not in map(identity, listed(flat, "enum", at)):
            raise nothing_fits(at, "const is none of enum")
        flat["enum"] = [value]
    if isinstance(flat.get("items"), list):
        # As it was before 2020-12.
        flat["prefixItems"] = flat.pop("items")
        flat["items"] = schema.get("additionalItems", True)
    elif "additionalItems" in schema and "prefixItems" in flat:
        raise refused(at, "additionalItems beside prefixItems is not supported")
    return flat


def _negated(schema: Any, at: str) -> Any:
    """Return what does not fit a schema, where that can be said."""
    if isinstance(schema, bool):
        return not schema
    if isinstance(schema, dict) and not schema:
        return False
    if isinstance(schema, dict) and schema.keys() == {"type"}:
        forbidden = set(types_of(schema, at) or ())
        if "integer" in forbidden:
            # Numbers that are no integers cannot be asked for; without any, all is right.
            forbidden.add("number")
        if "number" in forbidden:
            forbidden.add("integer")
        left = [type_ for type_ in OF_TYPE if type_ not in forbidden and type_ != "integer"]
        return {"type": left} if left else False
    raise refused(at, "the keyword not is not supported but for a type alone")


def _dependencies(schema: Schema, at: str) -> dict[str, Any]:
    """Return what holds where a property is there, by its name."""
    needs: dict[str, Any] = {}
    for word in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, part in mapped(schema, word, at).items():
            need = {"required": names(part, word, at)} if isinstance(part, list) else part
            needs[name] = both(needs.get(name, True), need)
    return needs


def _closed(flat: Schema, schema: Schema) -> Schema:
    """Return `flat` with what holds for names and items that none of its parts looked at."""
    closed = dict(flat)
    for word, own in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        if word in schema and own not in flat and schema[word] is not True:
            closed[own] = schema[word]
    return closed


def both(left: Any, right: Any) -> Any:
    """Return the schema of what fits two."""
    if left is True or left == right:
        return right
    if right is True:
        return left
    if left is False or right is False:
        return False
    return {"allOf": [left, right]}


def met(left: Schema, right: Schema, at: str) -> Schema:
    """Return the flat schema of what fits two."""
    if not left or not right:
        return left or right
    found: Schema = {}
    for word in {**left, **right}:
        if word not in left or word not in right:
            found[word] = left[word] if word in left else right[word]
        else:
            found[word] = _met_word(word, left, right, at)
    _meet_objects(found, left, right, at)
    _meet_arrays(found, left, right)
    return found


def _met_word(word: str, left: Schema, right: Schema, at: str) -> Any:
    one, other = left[word], right[word]
    if one == other and not isinstance(one, bool) and not isinstance(other, bool):
        return one
    if word == "type":
        return _met_types(left, right, at)
    if word == "enum":
        theirs = {*map(identity, listed(right, word, at))}
        shared = [value for value in listed(left, word, at) if identity(value) in theirs]
        if not shared:
            raise nothing_fits(at, "no value is in every enum")
        return shared
    if word in _LARGER or word in _SMALLER:
        for value in (one, other):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise refused(at, f"{word} is {quoted(value)}; it is a number")
        return max(one, other) if word in _LARGER else min(one, other)
    if word == "multipleOf" and isinstance(one, int) and isinstance(other, int) and one and other:
        return math.lcm(one, other)
    if word == "required":
        return [*names(one, word, at), *(n for n in names(other, word, at) if n not in one)]
    if word == "uniqueItems":
        return one or other
    if word in {"pattern", "format", "patternProperties", "multipleOf", "contains"}:
        raise refused(at, f"{word} in several schemas that hold at once is not supported")
    return both(one, other)


def _met_types(left: Schema, right: Schema, at: str) -> list[str]:
    one, other = types_of(left, at) or [], types_of(right, at) or []
    found = [type_ for type_ in one if type_ in other]
    for mine, theirs in ((one, other), (other, one)):
        if "integer" in mine and "number" in theirs and "integer" not in found:
            found.append("integer")
    if not found:
        raise nothing_fits(at, "no type is in every schema that holds")
    return found


def _meet_objects(found: Schema, left: Schema, right: Schema, at: str) -> None:
    if "properties" not in found:
        return
    if "patternProperties" in found and left.get("properties") != right.get("properties"):
        raise refused(at, "patternProperties in one of several schemas is not supported")
    one, other = mapped(left, "properties", at), mapped(right, "properties", at)
    merged: dict[str, Any] = {}
    for name in {**one, **other}:
        mine = one[name] if name in one else left.get("additionalProperties", True)
        theirs = other[name] if name in other else right.get("additionalProperties", True)
        merged[name] = both(mine, theirs)
    found["properties"] = merged


def _meet_arrays(found: Schema, left: Schema, right: Schema) -> None:
    if "prefixItems" not in found:
        return
    one, other = left.get("prefixItems", []), right.get("prefixItems", [])
    if not isinstance(one, list) or not isinstance(other, list):
        return  # told where it is written
    rest, others = left.get("items", True), right.get("items", True)
    found["prefixItems"] = [
        both(mine, theirs)
        for mine, theirs in itertools.zip_longest(
            one + [rest] * (len(other) - len(one)), other + [others] * (len(one) - len(other))
        )
    ]

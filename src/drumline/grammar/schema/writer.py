"""A schema, written anew from what is honoured.

It follows references and decides what may stand as it is; what a flat schema comes to is
its neighbours' business. Keywords that are none of the language are ignored, as the
language asks.
"""

import json
from typing import Any, NoReturn

from drumline.core.errors import quoted
from drumline.grammar.bounds import RefusedGrammarError, check_json_nesting, check_size
from drumline.grammar.schema.meeting import Meeting
from drumline.grammar.schema.references import localized
from drumline.grammar.schema.typed import types_meant, values, written
from drumline.grammar.schema.words import (
    ALTERNATIVES,
    COMPOUND,
    FLAT,
    NothingFitsError,
    Schema,
    check_honoured,
    listed,
    nothing_fits,
    refused,
)

MAX_DEFINITIONS = 512
MAX_PARTS = 20_000
"""Schemas within one schema, written once for each place that they come to stand at."""


def rewritten(source: str) -> str:
    """Return the JSON schema `source` as a compiler gets it.

    Raises RefusedGrammarError naming the keyword, and where it stands, that is not honoured.
    """
    check_size(source)
    check_json_nesting(source)
    try:
        schema = json.loads(source, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RefusedGrammarError(f"it is no JSON: {error}") from None
    return rewritten_value(schema)


def rewritten_value(schema: Any) -> str:
    """Return a decoded JSON schema as a compiler gets it; see `rewritten`."""
    return json.dumps(_Writer(schema).whole(), ensure_ascii=False, separators=(",", ":"))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


class _Writer:
    """One schema's rewriting."""

    def __init__(self, root: Any) -> None:
        self._root = localized(root)
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Schema] = {}
        self._meeting = Meeting(self._target)
        self._parts = 0

    def whole(self) -> Schema:
        try:
            done = self._write(self._root, "#")
        except RecursionError:
            raise RefusedGrammarError("its references lead too deep") from None
        return {**done, "$defs": self._definitions} if self._definitions else done

    def _write(self, schema: Any, at: str) -> Schema:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise RefusedGrammarError(f"it comes to more than {MAX_PARTS} schemas")
        if schema is True:
            return {}
        if schema is False:
            raise nothing_fits(at, "a schema of `false` permits nothing")
        if not isinstance(schema, dict):
            raise refused(at, "a schema is an object or a boolean")
        check_honoured(schema, at)
        compound = schema.keys() & COMPOUND
        if compound and not schema.keys() & FLAT:
            # What stands alone is kept as it is: a reference may lead back here.
            if compound == {"$ref"}:
                return self._reference(schema["$ref"], at)
            if compound == {"allOf"} and len(listed(schema, "allOf", at)) == 1:
                return self._write(schema["allOf"][0], f"{at}/allOf/0")
            if compound == {"oneOf"}:
                # Raises unless no value fits two.
                self._meeting.alternatives(schema, at)
            for word in ALTERNATIVES[1:]:
                if compound == {word}:
                    branches = [
                        (part, f"{at}/{word}/{index}")
                        for index, part in enumerate(listed(schema, word, at))
                    ]
                    return self._any(branches, self._write)
        flats = self._meeting.alternatives(schema, at)
        return self._any([(flat, at) for flat in flats], self._write_flat)

    def _any(self, parts: list[tuple[Any, str]], write: Any) -> Schema:
        """Return the alternatives that something fits."""
        found: list[Schema] = []
        nothing = None
        for part, place in parts:
            try:
                found.append(write(part, place))
            except NothingFitsError as error:
                nothing = error
        if not found and nothing is not None:
            raise nothing
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _write_flat(self, flat: Schema, at: str) -> Schema:
        if "enum" in flat:
            return values(flat, at)
        types = [(type_, at) for type_ in types_meant(flat, at)]
        if not types:
            return {}
        return self._any(types, lambda type_, _: written(type_, flat, at, self._write))

    # References

    def _reference(self, pointer: Any, at: str) -> Schema:
        self._refuse_cycle(pointer, at)
        name = self._names.get(pointer)
        if name is None:
            if len(self._names) >= MAX_DEFINITIONS:
                raise refused(at, f"$ref: more than {MAX_DEFINITIONS} definitions are in use")
            name = f"d{len(self._names)}"
            self._names[pointer] = name
            self._definitions[name] = {}
            # A definition has the place of the root: `$id` is refused in either.
            self._definitions[name] = self._write(self._target(pointer, at), pointer)
        return {"$ref": f"#/$defs/{name}"}

    def _refuse_cycle(self, pointer: Any, at: str) -> None:
        seen: list[str] = []
        while pointer not in seen:
            target = self._target(pointer, at)
            seen.append(pointer)
            if not isinstance(target, dict) or not isinstance(target.get("$ref"), str):
                return
            pointer = target["$ref"]
            if not pointer.startswith("#"):
                return
        raise refused(at, f"$ref {quoted(pointer)} leads back to itself")

    def _target(self, pointer: Any, at: str) -> Any:
        """Return the schema that a reference leads to."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise refused(
                at, f"$ref {quoted(pointer)}: only references into the schema are supported"
            )
        found = self._root
        for step in pointer.split("/")[1:]:
            key = _unescaped(step)
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise refused(at, f"$ref {quoted(pointer)}: there is no such schema")
            if isinstance(found, dict) and isinstance(found.get("$id"), str):
                raise refused(
                    at, f"$ref {quoted(pointer)} leads into a schema with an $id of its own"
                )
        return found


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

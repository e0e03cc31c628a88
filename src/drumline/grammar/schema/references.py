"""References within a schema, whatever they name their targets by, as pointers from its root.

A schema may give parts of itself a URI (`$id`) or a name (`$anchor`), and what is relative
is relative to the nearest URI around it. Here both are taken out, and every reference that
leads into the schema becomes a pointer. One that leads elsewhere stays as it is, for others
to refuse. Only what stands where the language has a schema is looked at: an `$id` among the
values of an `enum` names nothing.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from drumline.core.errors import excerpt, quoted
from drumline.grammar.bounds import RefusedGrammarError

Path = tuple[str, ...]

_ONE = (
    "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties",
    "unevaluatedProperties", "propertyNames", "not", "if", "then", "else",
)  # fmt: skip
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = (
    "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies",
)  # fmt: skip


def localized(root: Any) -> Any:
    """Return a schema of which all references into itself are pointers from its root.

    Raises RefusedGrammarError for a name that is no URI.
    """
    places = _Places(root)
    return places.rewritten(root, (), _base(root, (), "")) if places.names_parts else root


class _Places:
    """The schemas within one, by what references may call them."""

    def __init__(self, root: Any) -> None:
        self._seen: set[Path] = set()
        self._resources: dict[str, Path] = {"": ()}
        self._anchors: dict[tuple[str, str], Path] = {}
        self.names_parts = False
        """Whether any part has a URI or a name."""
        self._note(root, (), "")

    def _note(self, schema: Any, path: Path, base: str) -> None:
        if not isinstance(schema, dict):
            return
        self._seen.add(path)
        own = _base(schema, path, base)
        if own != base or not path:
            self._resources.setdefault(own, path)
        told, anchor = schema.get("$id"), schema.get("$anchor")
        if isinstance(told, str):
            self.names_parts = True
            if told.startswith("#"):  # how anchors were written before there were any
                anchor = told[1:]
        if isinstance(anchor, str):
            self.names_parts = True
            self._anchors.setdefault((own, anchor), path)
        for step, part in _parts(schema):
            self._note(part, path + step, own)

    def rewritten(self, schema: Any, path: Path, base: str) -> Any:
        """Return the schema at a place with its references as pointers, and without names."""
        if not isinstance(schema, dict):
            return schema
        done = dict(schema)
        if "$ref" not in schema or not path:
            done.pop("$id", None)
        done.pop("$anchor", None)
        reference = schema.get("$ref")
        if isinstance(reference, str) and (target := self._target(reference, base)) is not None:
            done["$ref"] = "#" + "".join(f"/{_escaped(step)}" for step in target)
        for step, part in _parts(schema):
            here = path + step
            inner = self.rewritten(part, here, _base(part, here, base))
            if len(step) == 1:
                done[step[0]] = inner
            else:
                held = done[step[0]]
                if held is schema[step[0]]:
                    held = done[step[0]] = held.copy()
                held[int(step[1]) if isinstance(held, list) else step[1]] = inner
        return done

    def _target(self, reference: str, base: str) -> Path | None:
        """Return where a reference leads; None if it does not lead to a schema in here."""
        uri, _, fragment = reference.partition("#")
        whole = _absolute(base, uri) if uri else base
        resource = self._resources.get(whole)
        if resource is None:
            return None
        if not fragment:
            return resource
        if not fragment.startswith("/"):
            return self._anchors.get((whole, unquote(fragment)))
        steps = (unquote(step) for step in fragment[1:].split("/"))
        path = resource + tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)
        # What is no place of a schema was not looked at: what is in it would be misread.
        return path if path in self._seen or not resource else None


def _base(schema: Any, path: Path, base: str) -> str:
    """Return what references in a schema are relative to; `base` is what it is itself."""
    told = schema.get("$id") if isinstance(schema, dict) else None
    # Beside `$ref` one draft of the language ignores it and another does not, but for the root.
    if not isinstance(told, str) or told.startswith("#") or ("$ref" in schema and path):
        return base
    return _absolute(base, told)


def _absolute(base: str, uri: str) -> str:
    """Return what a URI is, seen from a base. Raises RefusedGrammarError where it is none."""
    try:
        return urldefrag(urljoin(base, uri)).url
    except ValueError as error:
        raise RefusedGrammarError(f"{quoted(uri)} is no URI: {excerpt(str(error))}") from None


def _parts(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas that stand in one, each with the steps that lead there."""
    for word in _ONE:
        if isinstance(schema.get(word), dict):
            yield (word,), schema[word]
    for word in _SEVERAL:
        if isinstance(schema.get(word), list):
            for index, part in enumerate(schema[word]):
                yield (word, str(index)), part
    for word in _BY_NAME:
        if isinstance(schema.get(word), dict):
            for name, part in schema[word].items():
                yield (word, name), part


def _escaped(step: str) -> str:
    return step.replace("%", "%25").replace("~", "~0").replace("/", "~1")

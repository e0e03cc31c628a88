"""From a client's grammar to what a compiler is given: bounded, checked, rewritten."""

import json
from typing import Any

from msgspec import Struct

from drumline.contract.grammar import GrammarKey, GrammarKind
from drumline.grammar.bounds import (
    MAX_CHOICES,
    RefusedGrammarError,
    check_ebnf,
    check_json_nesting,
    check_size,
)
from drumline.grammar.regexes import check_regex
from drumline.grammar.schema.writer import rewritten, rewritten_value

ANY_OBJECT = "$$ANY$$"
"""What some senders write for a schema that any object fits."""
ANY_OBJECT_SCHEMA = '{"type":"object","additionalProperties":true}'
"""What a schema is written as that any object fits."""

_OF_IDS = ("token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch")
"""Formats of structural tags that ask for ids."""


class Prepared(Struct, frozen=True, tag="grammar"):
    """A grammar that may be compiled. A JSON object is a schema by now."""

    kind: GrammarKind
    source: str


def prepared(key: GrammarKey) -> Prepared:
    """Return what to compile for `key`. Raises RefusedGrammarError saying what can never be."""
    kind, source = key.kind, key.source
    check_size(source)
    match kind:
        case GrammarKind.JSON_OBJECT:
            return Prepared(GrammarKind.JSON_SCHEMA, ANY_OBJECT_SCHEMA)
        case GrammarKind.JSON_SCHEMA:
            if source == ANY_OBJECT:
                return Prepared(kind, ANY_OBJECT_SCHEMA)
            return Prepared(kind, rewritten(source))
        case GrammarKind.REGEX:
            check_regex(source)
            return Prepared(kind, source)
        case GrammarKind.EBNF:
            check_ebnf(source)
            return Prepared(kind, source)
        case GrammarKind.CHOICE:
            return Prepared(kind, json.dumps(_choices(source)))
        case GrammarKind.STRUCTURAL_TAG:
            return Prepared(kind, json.dumps(_tagged(_decoded(source))))


def _decoded(source: str) -> Any:
    check_json_nesting(source)
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RefusedGrammarError(f"it is no JSON: {error}") from None


def _choices(source: str) -> list[str]:
    choices = _decoded(source)
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise RefusedGrammarError("choices are a list of at least one string, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise RefusedGrammarError(f"there are {len(choices)} choices; {MAX_CHOICES} are allowed")
    return list(dict.fromkeys(choices))


def _tagged(value: Any) -> Any:
    """Return a structural tag with every schema in it rewritten and every regex checked."""
    if isinstance(value, list):
        return [_tagged(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in _OF_IDS:
        raise RefusedGrammarError(
            f"the format {value['type']} of a structural tag is not supported: tags are text, "
            "not ids, which may mark structure"
        )
    written = {}
    for name, part in value.items():
        if name in {"json_schema", "schema"} and isinstance(part, dict | bool | str):
            written[name] = json.loads(
                rewritten(part) if isinstance(part, str) else rewritten_value(part)
            )
        elif name == "pattern" and isinstance(part, str):
            check_regex(part)
            written[name] = part
        elif name == "grammar" and isinstance(part, str):
            check_ebnf(part)
            written[name] = part
        else:
            written[name] = _tagged(part)
    return written

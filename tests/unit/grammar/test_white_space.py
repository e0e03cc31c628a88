r"""What llguidance's \s would match otherwise than JSON Schema does is refused by its name."""

import json

import pytest

from drumline.contract.grammar import GrammarKey, GrammarKind
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.prepare import prepared
from drumline.grammar.white_space import check_white_space


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"pattern": r"^a\sb$"}, r"at #/pattern: \\s"),
        ({"items": {"anyOf": [{}, {"pattern": r"[^\S]"}]}}, r"at #/items/anyOf/1/pattern: \\S"),
        ({"patternProperties": {r"^\s": {}}}, r"at #/patternProperties: \\s"),
        (
            {"properties": {"pattern": {"pattern": r"\\\s"}}},
            r"at #/properties/pattern/pattern: \\s",
        ),
    ],
)
def test_a_pattern_that_asks_for_white_space_by_its_class_is_refused(schema, told):
    with pytest.raises(RefusedGrammarError, match=told):
        check_white_space(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"pattern": r"^\\s[ \t]$"},
        {"const": {"pattern": r"\s"}, "enum": [{"pattern": r"\S"}]},
        {"properties": {"pattern": {"type": "string"}, r"\s": {}}},
    ],
)
def test_what_only_looks_like_it_is_taken(schema):
    check_white_space(schema)


def test_one_library_refuses_it_and_the_other_knows_the_language_s_white_space(library):
    key = GrammarKey(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": r"^a\sb$"}))
    if library.name == "llguidance":
        with pytest.raises(RefusedGrammarError, match="not supported with llguidance"):
            library.backend.compile(prepared(key))
        return
    grammar = library.backend.compile(prepared(key))
    assert library.accepts(grammar, '"a b"', masked=False)
    assert not library.accepts(grammar, '"a\x85b"', masked=False)

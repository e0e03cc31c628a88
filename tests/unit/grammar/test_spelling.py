"""What a vocabulary with gaps cannot spell is told before anybody waits for it."""

import json

import pytest

from drumline.contract.grammar import GrammarKey, GrammarKind
from drumline.core.config import GrammarBackend
from drumline.grammar.backends import open_backend
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.prepare import prepared
from drumline.grammar.spelling import MANY, MAX_PLACES, Spelling
from drumline.grammar.vocabulary import Vocabulary

GAPS = Vocabulary((b"", b"a", b"b", b"c", b"ab", b"{", b"}", b'"', "é".encode()), (0,))
WHOLE = Vocabulary((b"", *(bytes((each,)) for each in range(256))), (0,))


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request):
    return open_backend(GrammarBackend(request.param), GAPS)


def said(backend, kind, source, vocabulary=GAPS):
    """Return what of a grammar cannot be spelled, or None."""
    asked = prepared(GrammarKey(GrammarKind(kind), source))
    try:
        Spelling(vocabulary).check(asked, backend.compile(asked))
    except RefusedGrammarError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "source", "missing"),
    [
        ("choice", '["abc", "abd"]', "cannot spell the choice 'abd'"),
        ("choice", '["\\u20ac"]', "cannot spell the choice '€'"),
        ("regex", "xyz", "cannot spell 'xyz', with which it begins"),
        ("regex", "(ab|c)d+", "cannot spell"),
        ("ebnf", 'root ::= "ab" "z" | "ba" "d"', "cannot spell"),
        ("json_schema", '{"type": "object"}', None),
        ("json_schema", '{"type": "integer"}', "cannot spell what the grammar asks for"),
        ("json_schema", '{"enum": ["abd"]}', "cannot spell"),
        ("regex", "[a-z]+", None),
        ("regex", "a(d|b)", None),
        ("choice", '["abc", "é", "aab"]', None),
    ],
)
def test_what_cannot_be_spelled_is_named(backend, kind, source, missing):
    found = said(backend, kind, source)
    assert (found is None) if missing is None else (missing in (found or "")), found


def test_the_farthest_way_that_ends_in_nothing_is_told(backend):
    assert said(backend, "regex", "abcd") == "the model's vocabulary cannot spell 'd' behind 'abc'"


def test_no_more_is_looked_at_than_a_bounded_part(backend):
    long = "a" * (MAX_PLACES + 5) + "d"
    assert said(backend, "regex", long) is None
    assert said(backend, "choice", json.dumps([long])) is not None
    assert GAPS.size - 1 < MANY  # so that it was not this that ended the search


def test_a_vocabulary_of_all_bytes_has_no_gaps_and_is_asked_nothing():
    assert Spelling(WHOLE).complete
    assert not Spelling(GAPS).complete
    Spelling(WHOLE).check(prepared(GrammarKey(GrammarKind.CHOICE, '["€"]')), None)


def test_the_embedded_model_spells_no_unused_control_letter(library):
    assert "the choice '\\x04'" in said(
        library.backend, "choice", '["yes", "\\u0004"]', library.vocabulary
    )
    assert (
        said(library.backend, "choice", '["yes", "n\\u00f6 \\ud83d\\ude00"]', library.vocabulary)
        is None
    )

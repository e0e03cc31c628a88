"""Grammars of every kind, followed token by token on both libraries."""

import json
import random

import jsonschema
import numpy as np
import pytest

from drumline.contract.grammar import GrammarKey, GrammarKind
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.prepare import prepared

from .conftest import EOS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "born": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
        "size": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 3},
    },
    "required": ["name", "age"],
}


def compiled(library, kind, source):
    return library.backend.compile(prepared(GrammarKey(GrammarKind(kind), source)))


def refusal(library, kind, source):
    """Return why a grammar is refused, or None."""
    try:
        compiled(library, kind, source)
    except RefusedGrammarError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "source", "right", "wrong"),
    [
        ("json_object", "", ['{"a": [1, {"b": null}]}', "{}"], ["[1]", "x"]),
        ("json_schema", json.dumps(PERSON), ['{"name":"Ann","age":7}'],
         ['{"name":"Ann"}', '{"name":"Ann","age":200}', '{"name":"Ann","age":7,"b":1}']),
        ("json_schema", "$$ANY$$", ["{}"], ["3"]),
        ("regex", r"[0-9]{3}-[0-9]{4}", ["555-1234"], ["555-123", "x555-1234"]),
        ("ebnf", 'root ::= "yes" | "no" more\nmore ::= "!" more | "."', ["yes", "no!!."], ["no"]),
        ("choice", json.dumps(["red", "reddish", 'q"\\\n']), ["red", "reddish", 'q"\\\n'],
         ["reddi", "blue"]),
    ],
)  # fmt: skip
def test_what_fits_a_grammar_is_taken_and_nothing_else(library, kind, source, right, wrong):
    grammar = compiled(library, kind, source)
    for text in right:
        assert library.accepts(grammar, text), text
    for text in wrong:
        assert not library.accepts(grammar, text), text


def is_object(text):
    try:
        return isinstance(json.loads(text, parse_constant=int), dict)  # no int is called NaN
    except ValueError:
        return False


def test_any_object_is_taken_and_nothing_that_a_reader_of_json_would_refuse(library):
    grammar = compiled(library, "json_object", "")
    draw = random.Random(5)

    def value(depth):
        kind = draw.randrange(7 if depth else 5)
        if kind > 4:
            parts = [value(depth - 1) for _ in range(draw.randrange(3))]
            return parts if kind == 5 else {text(): part for part in parts}
        numbers = (0, -7, 1203, 0.5, -1.25e-9, 3e20)
        return (None, True, text(), text(), draw.choice(numbers))[kind]

    def text():
        return "".join(draw.choices('ab "\\/:,{}[]é€😀0\n\t', k=draw.randrange(6)))

    wrong = 0
    for n in range(120):
        told = {text(): value(3) for _ in range(draw.randrange(4))}
        # llguidance lets letters stand for themselves alone.
        escaped = bool(n % 2) and library.name == "xgrammar"
        right = json.dumps(told, ensure_ascii=escaped, indent=draw.choice([None, 2]))
        assert library.accepts(grammar, right, masked=False), right
        place = draw.randrange(len(right))
        ill = right[:place] + draw.choice('{}[]":,0-.e1 tn\\x') + right[place + draw.randrange(2) :]
        if not is_object(ill):
            wrong += 1
            assert not library.accepts(grammar, ill, masked=False), ill
    assert wrong > 60
    for ill in ('{"a":"\x01"}', '{"a":01}', '{"a":1.}', '{"a":+1}', '{"a":1,}', '{"a"}', "{} {}"):
        assert not library.accepts(grammar, ill, masked=False), ill


def test_a_mask_says_all_of_its_row_whatever_was_there_before(library, tokenizer):
    words = library.vocabulary.mask_words
    for kind, source, text in (
        ("json_object", "", '{"a": [1, "two'),
        ("regex", "(.|\n)*", "free"),
        ("choice", '["red"]', "r"),
    ):
        matcher = compiled(library, kind, source).matcher()
        for token in (None, *tokenizer.encode(text, add_special=False)):
            if token is not None:
                assert matcher.accept(token)
            masks = np.array([np.zeros(words), np.full(words, -1), np.full(words, 77)], np.int32)
            for row in range(3):
                matcher.fill(masks, row)
            assert (masks == masks[0]).all()


def test_structural_tags_hold_what_is_within_them(library):
    tag = {
        "structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}],
        "triggers": ["<f"],
    }
    grammar = compiled(library, "structural_tag", json.dumps(tag))
    assert library.accepts(grammar, 'so <f>{"name":"A","age":1}</f> it is')
    assert not library.accepts(grammar, 'so <f>{"name":"A"}</f>')


@pytest.mark.parametrize(
    ("format_", "right", "wrong"),
    [
        ({"type": "or", "elements": [{"type": "const_string", "value": "no"},
          {"type": "optional", "content": {"type": "json_schema", "json_schema": {"enum": [1]}}}]},
         ["no", "1"], ["2", "no1"]),
        ({"type": "sequence", "elements": [{"type": "plus", "content": {"type": "const_string",
          "value": "a"}}, {"type": "star", "content": {"type": "const_string", "value": "b"}}]},
         ["a", "aabb"], ["b", "aba"]),
        ({"type": "triggered_tags", "triggers": ["<t"], "at_least_one": True, "tags": [
          {"type": "tag", "begin": "<t>", "end": "</t>", "content": {"type": "const_string",
          "value": "x"}}]},
         ["<t>x</t>", "<t>x</t> so"], ["so", "<t>y</t>"]),
    ],
)  # fmt: skip
def test_formats_of_structural_tags_hold(library, format_, right, wrong):
    grammar = compiled(library, "structural_tag", json.dumps({"format": format_}))
    for text in right:
        assert library.accepts(grammar, text, masked=False), text
    for text in wrong:
        assert not library.accepts(grammar, text, masked=False), text


def test_a_format_that_a_library_does_not_know_is_refused_by_its_name(library):
    for name in ("token", "any_tokens", "token_dispatch", "nonsense"):
        said = refusal(library, "structural_tag", json.dumps({"format": {"type": name}}))
        assert name in said


@pytest.mark.parametrize("kind", ["regex", "ebnf", "structural_tag", "choice", "json_schema"])
@pytest.mark.parametrize(
    "source", ["", "(a", "[a", "root ::= x", "[]", "{", '{"format": {}}', "\ud800"]
)
def test_what_is_no_grammar_is_refused_or_compiles_and_never_crashes(library, kind, source):
    said = refusal(library, kind, source)
    assert said is None or said


def test_ids_that_mark_structure_are_never_allowed(library, tokenizer):
    grammar = compiled(library, "regex", "(.|\n)*")
    matcher = grammar.matcher()
    mask = np.zeros((1, library.vocabulary.mask_words), np.int32)
    matcher.fill(mask, 0)
    bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: library.vocabulary.size]
    special = [id_ for id_ in range(library.vocabulary.size) if tokenizer.is_special(id_)]
    assert special
    assert not bits[[id_ for id_ in special if id_ != EOS]].any()
    assert not any(matcher.accept(id_) for id_ in special if id_ != EOS)
    assert bits[EOS]
    assert bits.sum() > 10_000


@pytest.mark.parametrize(
    ("kind", "source", "before"),
    [
        ("json_object", "", '{"a": "x '),
        ("json_schema", '{"type":"string","maxLength":40}', '"x '),
        ("structural_tag", '{"structures":[{"begin":"<f>","schema":{},"end":"</f>"}],'
         '"triggers":["<f"]}', "so "),
    ],
)  # fmt: skip
def test_the_name_of_an_id_that_marks_structure_is_text_and_never_that_id(
    library, tokenizer, kind, source, before
):
    matcher = compiled(library, kind, source).matcher()
    for token in tokenizer.encode(before, add_special=False):
        assert matcher.accept(token)
    special = [id_ for id_ in range(library.vocabulary.size) if tokenizer.is_special(id_)]
    # The end of the turn, spelled out in letters.
    name = "<|im_end|>"
    assert tokenizer.encode(name, add_special=False) == [EOS]
    masks = np.zeros((1, library.vocabulary.mask_words), np.int32)
    ids = {piece: id_ for id_, piece in enumerate(library.vocabulary.pieces) if piece}
    for letter in name.encode():
        matcher.fill(masks, 0)
        allowed = np.unpackbits(masks.view(np.uint8), bitorder="little")
        if kind != "structural_tag":  # free text may end anywhere
            assert not allowed[special].any()
            assert not any(matcher.accept(id_) for id_ in special)
        assert not allowed[[id_ for id_ in special if id_ != EOS]].any()
        assert matcher.accept(ids[bytes([letter])])
    assert not matcher.terminated


def test_what_was_taken_can_be_taken_back_an_end_too(library, tokenizer):
    matcher = compiled(library, "choice", '["red"]').matcher()
    ids = tokenizer.encode("red", add_special=False)
    for token in [*ids, EOS]:
        assert matcher.accept(token)
    assert matcher.terminated
    assert not matcher.accept(EOS)
    matcher.rollback(len(ids) + 1)
    assert not matcher.terminated
    assert not matcher.accept(EOS)
    for token in [*ids, EOS]:
        assert matcher.accept(token)


def test_a_token_that_does_not_fit_changes_nothing(library, tokenizer):
    matcher = compiled(library, "choice", '["red"]').matcher()
    [blue, *_] = tokenizer.encode("blue", add_special=False)
    for wrong in (blue, EOS, -1, library.vocabulary.size + 5):
        assert not matcher.accept(wrong)
    for token in [*tokenizer.encode("red", add_special=False), EOS]:
        assert matcher.accept(token)


def walk(library, grammar, draw, longest):
    """Return a text drawn from the masks, token by token, and whether the grammar ended it."""
    matcher = grammar.matcher()
    vocabulary = library.vocabulary
    mask = np.zeros((1, vocabulary.mask_words), np.int32)
    text = b""
    for _ in range(longest):
        matcher.fill(mask, 0)
        bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: vocabulary.size]
        allowed = np.flatnonzero(bits)
        assert len(allowed)
        # Whatever brings the end nearer is drawn as often as anything else.
        closing = [i for i in allowed[:200].tolist() if vocabulary.pieces[i] in CLOSING or i == EOS]
        token = draw.choice(closing) if closing and draw.random() < 0.5 else draw.choice(allowed)
        assert matcher.accept(int(token))
        if matcher.terminated:
            return text, True
        text += vocabulary.pieces[int(token)]
    return text, False


CLOSING = {b'"', b"}", b"]", b","}


def test_what_is_drawn_from_the_masks_validates(library):
    grammar = compiled(library, "json_schema", json.dumps(PERSON))
    validator = jsonschema.Draft202012Validator(
        PERSON, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    draw = random.Random(7)
    ended = 0
    for _ in range(20):
        text, done = walk(library, grammar, draw, 400)
        if done:
            ended += 1
            validator.validate(json.loads(text))
    assert ended >= 15

"""White space that goes on."""

import numpy as np
import pytest

from drumline.contract.grammar import GrammarKey, GrammarKind
from drumline.grammar.blanks import MAX_BLANKS, BlankRun, Blanks
from drumline.grammar.prepare import prepared
from drumline.grammar.vocabulary import Vocabulary

PIECES = (b"", b"a", b" ", b"\n\n", b" a", b"\t \r")


def run_of(*tokens):
    run = BlankRun(Blanks(Vocabulary(PIECES, (0,))))
    for token in tokens:
        run.accepted(token)
    return run


def cut(run, *allowed):
    bits = np.zeros((1, 32), np.bool_)
    bits[0, list(allowed)] = True
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    run.cut(masks, 0)
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()


def test_only_ids_of_nothing_but_white_space_are_cut_and_only_when_there_is_enough():
    everything = (0, 1, 2, 3, 4, 5)
    assert cut(run_of(*[2] * (MAX_BLANKS - 1)), *everything) == [*everything]
    assert cut(run_of(*[2] * MAX_BLANKS), *everything) == [0, 1, 4]
    assert cut(run_of(*[3] * (MAX_BLANKS // 2)), *everything) == [0, 1, 4]
    assert cut(run_of(*[2] * MAX_BLANKS, 4), *everything) == [*everything]


def test_what_a_text_cannot_do_without_is_left():
    assert cut(run_of(*[2] * MAX_BLANKS), 2, 3) == [2, 3]


def test_white_space_that_is_taken_back_does_not_count():
    run = run_of(*[2] * MAX_BLANKS)
    run.rolled_back(1)
    assert cut(run, 1, 2) == [1, 2]
    run.accepted(2)
    assert cut(run, 1, 2) == [1]


@pytest.mark.parametrize("kind", [GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA])
def test_json_that_goes_on_with_white_space_must_come_to_its_next_part(library, kind):
    source = '{"type":"object"}' if kind is GrammarKind.JSON_SCHEMA else ""
    matcher = library.backend.compile(prepared(GrammarKey(kind, source))).matcher()
    [blank] = library.tokenizer.encode("\n", add_special=False)
    masks = np.zeros((1, library.vocabulary.mask_words), np.int32)
    assert matcher.accept(library.tokenizer.encode("{", add_special=False)[0])
    for _ in range(MAX_BLANKS):
        matcher.fill(masks, 0)
        assert masks[0, blank // 32] >> (blank % 32) & 1
        assert matcher.accept(blank)
    matcher.fill(masks, 0)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")[: library.vocabulary.size]
    allowed = [library.vocabulary.pieces[id_] for id_ in np.flatnonzero(bits)]
    assert b"}" in allowed
    assert all(piece.strip() for piece in allowed)

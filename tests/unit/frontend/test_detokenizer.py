"""A stream's text is the same however its ids are cut, and no chunk breaks a character."""

from hypothesis import given
from hypothesis import strategies as st

from drumline.frontend.text.detokenizer import Detokenizer, decode


@st.composite
def cut(draw, ids):
    """`ids`, cut into chunks anywhere."""
    borders = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[a:b] for a, b in zip([0, *borders], [*borders, len(ids)], strict=True)]


def streamed(tokenizer, chunks, **options):
    stream = Detokenizer(tokenizer, **options)
    return [stream.add(chunk) for chunk in chunks] + [stream.finish()]


@given(data=st.data(), text=st.text(max_size=60))
def test_any_text_streams_whole_in_any_cut(embedded, data, text):
    ids = embedded.encode(text, add_special=False)
    chunks = streamed(embedded, data.draw(cut(ids)), skip_special=False)
    whole = decode(embedded, ids, skip_special=False)
    assert "".join(chunks) == whole
    assert "\ufffd" in whole or all("\ufffd" not in chunk for chunk in chunks)


@given(data=st.data(), ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_any_ids_stream_as_the_library_decodes_them_at_once(embedded, data, ids, skip):
    expected = embedded._pipeline.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(embedded, data.draw(cut(ids)), skip_special=skip)) == expected
    assert decode(embedded, ids, skip_special=skip) == expected


@given(data=st.data(), text=st.text("helo wrd,.!é你🎉", max_size=40))
def test_marked_spaces_stream_as_the_library_decodes_them(space_marked, data, text):
    ids = space_marked.encode(text, add_special=False)
    expected = space_marked._pipeline.decode(ids)
    assert expected == text
    assert "".join(streamed(space_marked, data.draw(cut(ids)))) == expected


@given(data=st.data(), ids=st.lists(st.integers(0, 273), max_size=20))
def test_cutting_never_changes_the_text_of_byte_pieces(space_marked, data, ids):
    assert "".join(streamed(space_marked, data.draw(cut(ids)))) == decode(space_marked, ids)


def test_a_special_token_inside_a_character_is_skipped_without_breaking_it(embedded):
    ids = embedded.encode("🎉", add_special=False)
    assert len(ids) > 1
    assert decode(embedded, [ids[0], 2, *ids[1:]]) == "🎉"


def test_an_unfinished_character_is_held_back_until_the_end(embedded):
    first, *_ = embedded.encode("你", add_special=False)
    stream = Detokenizer(embedded)
    assert stream.add([first]) == ""
    assert stream.finish() == "\ufffd"


def test_a_special_token_that_is_a_mark_is_shown_and_others_are_not(embedded):
    marks = embedded.special_ids(("<|im_start|>", "Hi", "no token at all"))
    assert len(marks) == 1
    ids = embedded.encode("<|im_start|>Hi<|im_end|>", add_special=False)
    assert Detokenizer(embedded, shown=marks).add(ids) == "<|im_start|>Hi"

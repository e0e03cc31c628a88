"""Text is cut at the first stop string, and no part of one is ever emitted."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drumline.frontend.text.stop_strings import StopStrings

LETTERS = "abé\n"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text, stops):
    """The match whose last character comes first, the longest of those; by trying them all."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


def feed(stops, chunks):
    stream = StopStrings(stops)
    emitted = [stream.add(chunk) for chunk in chunks]
    return stream, [*emitted, stream.finish()]


@given(
    stops=STOPS,
    chunks=st.lists(st.text(LETTERS, max_size=6), max_size=12),
)
@example(stops=["abcd", "bc"], chunks=["a", "b", "c", "d"])
@example(stops=["aab"], chunks=["aa", "ab"])
def test_what_is_emitted_is_the_text_cut_at_the_first_match(stops, chunks):
    text = "".join(chunks)
    match = first_match(text, stops)
    stream, emitted = feed(stops, chunks)
    assert "".join(emitted) == (text if match is None else text[: match[0]])
    assert stream.matched == (None if match is None else match[1])


@given(stops=STOPS, chunks=st.lists(st.text(LETTERS, max_size=6), max_size=12))
def test_only_what_may_begin_a_stop_string_is_held_back(stops, chunks):
    stream = StopStrings(stops)
    emitted = ""
    for index, chunk in enumerate(chunks):
        emitted += stream.add(chunk)
        if stream.matched is not None:
            return
        held = "".join(chunks[: index + 1])[len(emitted) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize("text", ["", "anything at all"])
def test_without_stop_strings_everything_passes(text):
    _, emitted = feed([], [text])
    assert "".join(emitted) == text


def test_nothing_follows_a_match():
    stream, emitted = feed(["x"], ["ax", "b"])
    assert emitted == ["a", "", ""]
    assert stream.matched == "x"

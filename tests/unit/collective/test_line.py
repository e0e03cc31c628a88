"""Frames on a connection: whole, in pieces, several at once, and others than are expected."""

import socket

import pytest

from drumline.collective import frame
from drumline.collective.frame import Form, Operation
from drumline.collective.line import Line
from drumline.core.errors import InvariantError

TAG = frame.tag(Operation.ALL_GATHER, 0, b"ranks[0-2]")
PARTS = [b"one", b"", b"three"]
FORM = Form(TAG, (3, 0, 5))


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    line = Line(1, 0, ours)
    theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    yield line, theirs
    line.close()
    theirs.close()


def whole(number, parts=PARTS):
    form = Form(TAG, tuple(map(len, parts)))
    return form.pack(number, form.head, *parts)


def received(line, number, count=3, limit=10**6):
    return line.receive(TAG, number, count, limit)


def test_a_frame_of_the_form_that_is_expected_is_taken_at_one_go(ends):
    line, other = ends
    other.sendall(whole(0))
    assert line.take(FORM, 0) == PARTS


def test_frames_that_came_together_are_taken_one_after_the_other(ends):
    line, other = ends
    other.sendall(b"".join(whole(number, [b"%d" % number] * 3) for number in range(900)))
    form = Form(TAG, (1, 1, 1))
    for number in range(900):
        parts = line.take(form, number)
        if parts is None:  # its numbers are longer now, or it ends behind what was read
            parts = received(line, number)
            form = Form(TAG, tuple(map(len, parts)))
        assert parts == [b"%d" % number] * 3


def test_a_frame_in_pieces_is_put_together(ends):
    line, other = ends
    data = whole(3)
    for cut in range(1, len(data)):
        other.sendall(data[:cut])
        assert line.take(FORM, 3) is None
        other.sendall(data[cut:] + data)
        assert received(line, 3) == PARTS
        # The other one is here whole, unless it was not yet when the first one was complete.
        assert line.take(FORM, 3) == PARTS or received(line, 3) == PARTS


@pytest.mark.parametrize("lengths", [(2, 0, 5), (3, 0, 6), (3, 0)])
def test_parts_of_other_lengths_are_another_form_of_the_same_exchange(ends, lengths):
    line, other = ends
    parts = [bytes(length) for length in lengths]
    other.sendall(whole(0, parts) + whole(1))
    assert line.take(FORM, 0) is None
    assert received(line, 0, len(parts)) == parts
    assert (line.take(FORM, 1) or received(line, 1)) == PARTS


@pytest.mark.parametrize(
    ("tag", "number", "words"),
    [
        (TAG, 8, "rank 0 is in all-gather 8 of ranks[0-2], but rank 1 is in all-gather 7 of"),
        (frame.tag(Operation.ALL_REDUCE, 1, b"ranks[0-2]"), 7, "rank 0 is in all-reduce max 7"),
        (frame.tag(Operation.ALL_GATHER, 0, b"others[0-2]"), 7, "all-gather 7 of others[0-2]"),
        (frame.tag(Operation.ALL_GATHER, 0, b"RANKS[0-2]"), 7, "all-gather 7 of RANKS[0-2]"),
    ],
)
def test_another_exchange_is_never_taken_and_named_with_both_ends(ends, tag, number, words):
    line, other = ends
    form = Form(tag, (3, 0, 5))
    other.sendall(form.pack(number, form.head, *PARTS))
    assert line.take(FORM, 7) is None
    with pytest.raises(InvariantError) as caught:
        received(line, 7)
    assert words in str(caught.value)


def test_a_frame_that_is_too_long_is_refused_before_it_is_read(ends):
    line, other = ends
    other.sendall(whole(0, [bytes(100)] * 3))
    assert line.take(FORM, 0) is None
    with pytest.raises(InvariantError, match="rank 0 announced 324 bytes in all-gather 0 of"):
        received(line, 0, limit=323)


@pytest.mark.parametrize("sent", [0, 5, 40])
def test_an_end_amid_a_frame_is_an_end(ends, sent):
    line, other = ends
    other.sendall(whole(0)[:sent])
    other.close()
    assert line.take(FORM, 0) is None
    with pytest.raises(EOFError):
        received(line, 0)

"""The bytes of an exchange."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.collective import frame
from drumline.collective.frame import Form, Operation
from drumline.contract.ports import Reduce
from drumline.core.errors import InvariantError


@pytest.mark.parametrize(
    ("members", "name"),
    [
        (range(4), "replica[0-3]"),
        ((0, 4), "replica[0,4]"),
        ((3, 4, 5, 1), "replica[3-5,1]"),
        ((7,), "replica[7]"),
    ],
)
def test_a_group_is_named_by_its_ranks(members, name):
    assert frame.label("replica", members) == name.encode()


def test_long_irregular_groups_have_short_names_that_differ():
    one = frame.label("replica", range(0, 400, 2))
    other = frame.label("replica", [*range(0, 396, 2), 397, 398])
    assert one != other
    assert one.startswith("replica[0…398, 200 ranks".encode())
    assert len(one) < 80


@pytest.mark.parametrize("name", ["", "x" * 65])
def test_a_group_needs_a_name_of_some_length(name):
    with pytest.raises(InvariantError, match="1 to 64 bytes"):
        frame.label(name, (0, 1))


@pytest.mark.parametrize("members", [(), (0, 0), (0, 4), (-1, 0)])
def test_a_group_is_of_distinct_ranks_that_exist(members):
    with pytest.raises(InvariantError, match="not distinct ranks of a mesh of 4"):
        frame.check_members(members, 4)


@pytest.mark.parametrize(
    ("operation", "detail", "words"),
    [
        (Operation.ALL_GATHER, 0, "all-gather 9 of a[0-1]"),
        (Operation.ALL_GATHER_INTS, 0, "all-gather of ints 9 of a[0-1]"),
        (Operation.ALL_REDUCE, frame.REDUCTIONS[Reduce.SUM], "all-reduce sum 9 of a[0-1]"),
        (Operation.BROADCAST, 1, "broadcast by member 1 9 of a[0-1]"),
        (77, 0, "an unknown exchange (operation 77, detail 0) of 'a[0-1]'"),
        (Operation.ALL_REDUCE, 9, "an unknown exchange (operation 3, detail 9) of 'a[0-1]'"),
    ],
)
def test_a_tag_reads_as_words(operation, detail, words):
    assert frame.describe(frame.tag(operation, detail, b"a[0-1]"), 9) == words


TAG = frame.tag(Operation.ALL_GATHER, 0, b"a[0-1]")


def packed(parts):
    form = Form(TAG, tuple(map(len, parts)))
    return form, form.pack(9, form.head, *parts)


@given(st.lists(st.binary(max_size=30), min_size=1))
def test_a_frame_is_read_by_its_form_and_without_it_alike(parts):
    form, whole = packed(parts)
    assert len(whole) == form.size
    assert form.unpack(b"before" + whole, 6) == (9, form.head, *parts)
    head = whole[: frame.HEAD_BYTES]
    number, length, label_bytes = frame.front(head)
    label, body = whole[len(head) : -length], whole[-length:]
    assert (number, len(label)) == (9, label_bytes)
    assert frame.tag_of(head, label) == TAG
    assert frame.split(body, len(parts)) == parts


def test_what_forms_have_alike_tells_them_apart():
    other = Form(frame.tag(Operation.ALL_GATHER, 0, b"b[0-1]"), (2, 1))
    heads = {Form(TAG, lengths).head for lengths in ((1, 2), (2, 1), (3,), (0, 3))}
    assert len({*heads, other.head}) == 5


@pytest.mark.parametrize("body", [b"short", bytes(16) + b"!"])
def test_a_body_that_holds_something_else_is_refused(body):
    with pytest.raises(InvariantError, match="a body of"):
        frame.split(body, 2)


@pytest.mark.parametrize("row", [[2**63], [1.5], ["a"], [-(2**63) - 1]])
def test_a_row_takes_64_bit_ints_only(row):
    with pytest.raises(InvariantError, match="64-bit ints"):
        frame.packed(row)


def test_rows_of_different_lengths_name_both_members():
    with pytest.raises(InvariantError, match="member 0 gave a row of 2 ints, member 1 one of 3"):
        frame.rows([frame.packed([1, 2]), frame.packed([1, 2, 3])])


def test_a_sum_that_overflows_is_named():
    with pytest.raises(InvariantError, match="sum of element 1, 9223372036854775808"):
        frame.reduced([[0, 2**63 - 1], [0, 1]], Reduce.SUM)

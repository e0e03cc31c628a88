"""The bytes of an exchange: which exchange a frame belongs to, and its parts.

A frame is the exchange's number in its group, the length of its body, a tag, and the body: the
lengths of its parts, then those. The tag says what else the two ends must agree on: operation,
its detail, and the group. Frames of one kind of exchange whose parts have the same lengths are
alike but for number and parts, so each is packed, and read, by one call of a `Form`; only a
frame that is not as expected is ever decoded, to say what the other end was doing.

It does not know sockets, nor what a part means.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import assert_never
from zlib import crc32

from drumline.contract.ports import Reduce
from drumline.core.errors import InvariantError

# Operation, bytes of the group's label, detail.
_TAG = struct.Struct("<BxHI")
# Number of the exchange, bytes of the body.
_FRONT = struct.Struct("<QQ")
HEAD_BYTES = _FRONT.size + _TAG.size
_LENGTH = struct.Struct("<Q")
_LONGEST_SPANS = 48
_LONGEST_NAME = 64
_INT64 = range(-(2**63), 2**63)


class Operation(IntEnum):
    """What a group does in one exchange."""

    ALL_GATHER = 1
    ALL_GATHER_INTS = 2
    ALL_REDUCE = 3
    BROADCAST = 4


# The detail of an all-reduce; a broadcast's is its root.
REDUCTIONS = {Reduce.MIN: 0, Reduce.MAX: 1, Reduce.SUM: 2}


def check_members(members: Sequence[int], size: int) -> None:
    """Raise InvariantError unless these are distinct ranks of a mesh of `size`."""
    known = all(0 <= rank < size for rank in members)
    if not members or not known or len(set(members)) != len(members):
        raise InvariantError(f"{list(members)} are not distinct ranks of a mesh of {size}")


def label(name: str, members: Sequence[int]) -> bytes:
    """Return how frames and messages name a group: `replica[0-3]`.

    A long, irregular member list is cut, and told apart by a checksum.
    """
    if not name or len(name.encode()) > _LONGEST_NAME:
        raise InvariantError(f"a group's name has 1 to {_LONGEST_NAME} bytes; got {name!r}")
    text = _spans(members)
    if len(text) > _LONGEST_SPANS:
        text = f"{members[0]}…{members[-1]}, {len(members)} ranks, {crc32(text.encode()):08x}"
    return f"{name}[{text}]".encode()


def _spans(members: Sequence[int]) -> str:
    """Return members in order, with consecutive ones joined: `0-3,8`."""
    starts = [0] + [i + 1 for i, (a, b) in enumerate(pairwise(members)) if b != a + 1]
    ends = [*starts[1:], len(members)]
    return ",".join(
        str(members[start]) if end - start == 1 else f"{members[start]}-{members[end - 1]}"
        for start, end in zip(starts, ends, strict=True)
    )


def tag(operation: Operation, detail: int, group: bytes) -> bytes:
    """Return the tag that the frames of one kind of exchange carry."""
    return _TAG.pack(operation, len(group), detail) + group


class Form:
    """Frames of one kind of exchange whose parts have these lengths."""

    __slots__ = ("head", "lengths", "pack", "size", "unpack")

    def __init__(self, tag: bytes, lengths: tuple[int, ...]) -> None:
        told = struct.pack(f"<{len(lengths)}Q", *lengths)
        self.lengths = lengths
        self.head = _LENGTH.pack(len(told) + sum(lengths)) + tag + told
        """What they have between their number and their parts."""
        whole = struct.Struct(f"<Q{len(self.head)}s{''.join(f'{each}s' for each in lengths)}")
        self.size = whole.size
        self.pack = whole.pack
        """Returns a frame of a number, the head, and parts."""
        self.unpack = whole.unpack_from
        """Returns those again, of a frame in a buffer."""


def front(head: bytes) -> tuple[int, int, int]:
    """Return a frame's number, and the lengths of its body and label, from its HEAD_BYTES."""
    sequence, body = _FRONT.unpack_from(head)
    return sequence, body, _TAG.unpack_from(head, _FRONT.size)[1]


def tag_of(head: bytes, group: bytes) -> bytes:
    """Return the tag that a frame's head and the label behind it make up."""
    return head[_FRONT.size :] + group


def describe(tag: bytes, sequence: int) -> str:
    """Return an exchange in words: `all-gather 7 of replica[0-3]`."""
    operation, _, detail = _TAG.unpack_from(tag)
    group = tag[_TAG.size :].decode(errors="replace")
    try:
        what = _words(Operation(operation), detail)
    except (ValueError, IndexError):
        return f"an unknown exchange (operation {operation}, detail {detail}) of {group!r}"
    return f"{what} {sequence} of {group}"


def _words(operation: Operation, detail: int) -> str:
    match operation:
        case Operation.ALL_GATHER:
            return "all-gather"
        case Operation.ALL_GATHER_INTS:
            return "all-gather of ints"
        case Operation.ALL_REDUCE:
            return f"all-reduce {list(REDUCTIONS)[detail].value}"
        case Operation.BROADCAST:
            return f"broadcast by member {detail}"
        case _:
            assert_never(operation)


def split(body: bytes, count: int) -> list[bytes]:
    """Return the `count` parts of a body."""
    start = _LENGTH.size * count
    if len(body) < start:
        raise InvariantError(f"a body of {len(body)} bytes cannot hold {count} lengths")
    lengths = struct.unpack_from(f"<{count}Q", body)
    if start + sum(lengths) != len(body):
        raise InvariantError(
            f"a body of {len(body)} bytes does not hold {count} parts of {sum(lengths)} bytes"
        )
    parts = []
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    return parts


def packed(row: Sequence[int]) -> bytes:
    """Return a row as 64-bit ints; InvariantError if a value is none."""
    try:
        return struct.pack(f"<{len(row)}q", *row)
    except struct.error:
        raise InvariantError(f"not all of {list(row)[:8]}… are 64-bit ints") from None


def rows(payloads: Sequence[bytes]) -> list[list[int]]:
    """Return packed rows as lists; InvariantError naming the members whose lengths differ."""
    length = len(payloads[0])
    for member, payload in enumerate(payloads):
        if len(payload) != length:
            raise InvariantError(
                f"member 0 gave a row of {length // 8} ints, member {member} one of "
                f"{len(payload) // 8}"
            )
    each = f"<{length // 8}q"
    return [list(struct.unpack(each, payload)) for payload in payloads]


def reduced(members: Sequence[Sequence[int]], how: Reduce) -> list[int]:
    """Return the element-wise reduction of equally long rows.

    InvariantError if a sum does not fit 64 bits.
    """
    columns = zip(*members, strict=True)
    match how:
        case Reduce.MIN:
            return list(map(min, columns))
        case Reduce.MAX:
            return list(map(max, columns))
        case Reduce.SUM:
            sums = list(map(sum, columns))
            for place, value in enumerate(sums):
                if value not in _INT64:
                    raise InvariantError(f"the sum of element {place}, {value}, overflows 64 bits")
            return sums
        case _:
            assert_never(how)

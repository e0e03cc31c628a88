"""The same-round gate: what every replica does in the same round, or none does.

A frontend asks each replica by itself, so one hears of an operation before another. Once
a round all say what they hold, and an operation at the head of their queues runs in the
round in which all hold it; a replica that came first never waits inside it for one that
has not heard.

It does not know what an operation does.
"""

from enum import IntEnum

from msgspec import Struct

from drumline.contract.ports import Group, Reduce
from drumline.control.operations import Operation
from drumline.core.errors import InvariantError


class Internal(IntEnum):
    """What the engine itself queues, in the same rounds on every replica."""

    SNAPSHOT = 1
    COMMIT = 2
    APPLY_CHUNK = 3


class Held(Struct, frozen=True):
    """What one replica brings to the gate."""

    flush: bool = False
    operation: Operation | None = None
    """At the head of the frontend's operations."""
    internal: Internal | None = None
    """At the head of the engine's own."""
    release: bool = False
    """It waits to release memory."""
    lacking: bool = False
    """Some of its memory is released, or no weights are loaded."""


class Passed(Struct, frozen=True):
    """What all replicas do in this round; at most one of the two operations."""

    flush: bool
    operation: Operation | None
    internal: Internal | None
    release: bool
    """Some replica waits to release memory, so all take part in finding out when it may."""
    lacking: bool
    """Some replica has no memory or no weights for a forward, so none may run one."""


def passed(world: Group, held: Held) -> Passed:
    """Return what the replicas do together.

    Collective: every rank of the world, every round. Raises InvariantError, with one text
    on all, when all hold an operation but not the same.
    """
    operation, internal = held.operation or 0, held.internal or 0
    if world.size == 1:
        first = held.operation
        return Passed(
            held.flush, first, held.internal if first is None else None, held.release, held.lacking
        )
    row = world.all_reduce(
        [
            held.flush,
            # The largest of these says whether some replica holds none.
            -1 if operation else 0,
            operation,
            -operation,
            -1 if internal else 0,
            internal,
            -internal,
            held.release,
            held.lacking,
        ],
        Reduce.MAX,
    )
    flush, lacks, most, least, lacks_own, most_own, least_own, release, lacking = row
    ready = lacks == -1
    ready_own = lacks_own == -1
    if ready and most != -least:
        raise InvariantError(
            "the data-parallel ranks hold different operations at the head of their queues: "
            f"{_name(Operation, -least)} and {_name(Operation, most)}; a frontend must send "
            "each operation to every rank, in one order"
        )
    if ready_own and most_own != -least_own:
        raise InvariantError(
            "the data-parallel ranks queued different steps of their own: "
            f"{_name(Internal, -least_own)} and {_name(Internal, most_own)}"
        )
    # One operation that blocks a round, the frontend's first.
    return Passed(
        bool(flush),
        Operation(most) if ready else None,
        Internal(most_own) if ready_own and not ready else None,
        bool(release),
        bool(lacking),
    )


def _name(kinds: type[IntEnum], code: int) -> str:
    return kinds(code).name.lower()

"""A group of a mesh's ranks, and how it exchanges.

A group is a star over its first member: the others give it their part, it gives back its answer;
two members just swap. All waits are plain blocking reads; what ends one early is the pulse, which
cuts the lines once the mesh has failed.

A member works for microseconds in an exchange and sleeps between two, while others have its
processor. What it touches then is in no cache, so an exchange costs as much as it touches, not as
it computes: that is why what most members do stands in one function, and a frame is one call.

It does not know what the bytes mean.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from drumline.collective import frame
from drumline.collective.frame import Form, Operation
from drumline.collective.line import Line
from drumline.collective.pulse import Failure, Pulse, Wait
from drumline.contract.ports import Reduce
from drumline.core.errors import DrumlineError, InvariantError

_PAIR = 2
_AT_ONCE_BYTES = 8 * 1024
_LENGTH_BYTES = 8


class _Kind:
    """One kind of exchange of a group: what its parts are, and the forms its frames had last."""

    __slots__ = ("answers", "came", "count", "packs", "reads", "root", "sent", "tag")

    def __init__(
        self,
        tag: bytes,
        size: int,
        *,
        packs: Callable[[Any], bytes] | None = None,
        answers: Callable[[list[bytes]], bytes] | None = None,
        reads: Callable[[list[bytes]], Any] | None = None,
        root: int | None = None,
    ) -> None:
        self.tag = tag
        self.packs = packs
        """What is given as a part; a part is given where this is None."""
        self.answers = answers
        """What becomes of all parts; they are the answer as they are where this is None."""
        self.reads = reads
        """The answer's parts as what is returned."""
        self.root = root
        """The only member to give a part, if there is one."""
        self.count = size if answers is None and root is None else 1
        """How many parts the answer has."""
        self.sent = Form(tag, (0,))
        self.came = [self.sent] * size
        """By the member that sent it."""


class MeshGroup:
    """A fixed set of a mesh's ranks that exchange in step: a `Group`.

    Every exchange raises PeerError when a rank of the mesh is gone, and InvariantError, with
    one text on all ranks, when the members are not in the same exchange or give what does not
    fit together.
    """

    __slots__ = (
        "_broadcasts",
        "_centre",
        "_downward",
        "_gather",
        "_gather_ints",
        "_label",
        "_limit",
        "_peer",
        "_pulse",
        "_rank",
        "_reduce",
        "_sequence",
        "_upward",
        "index",
        "size",
    )

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        label: bytes,
        lines: Mapping[int, Line],
        pulse: Pulse,
        limit: int,
    ) -> None:
        """Be member `rank`; what one gives has `limit` bytes at most."""
        self.index = members.index(rank)
        self.size = size = len(members)
        self._rank = rank
        self._label = label
        self._pulse = pulse
        self._limit = limit
        self._sequence = 0
        self._centre = lines[members[0]] if self.index else None
        """The line to the first member; None at that one."""
        self._peer = lines[members[1 - self.index]] if size == _PAIR else None
        """The line to the only other one."""
        others = () if self.index else members[1:]
        self._downward = tuple((place, lines[each]) for place, each in enumerate(others, 1))
        """The lines of the first member to the others, by their places."""
        self._upward = self._downward[::-1]
        self._gather = self._kind(Operation.ALL_GATHER)
        self._gather_ints = self._kind(
            Operation.ALL_GATHER_INTS, packs=frame.packed, reads=frame.rows
        )
        self._reduce = {
            how: self._kind(
                Operation.ALL_REDUCE,
                detail,
                packs=frame.packed,
                answers=partial(_reduced, how),
                reads=_row,
            )
            for how, detail in frame.REDUCTIONS.items()
        }
        self._broadcasts: dict[int, _Kind] = {}
        """By root; a group has few that are ever one."""

    def __repr__(self) -> str:
        return f"<{self._label.decode()}, member {self.index}, exchange {self._sequence}>"

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every member's payload, in member order."""
        gathered: list[bytes] = self._exchange(self._gather, payload)
        return gathered

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Return every member's row of 64-bit ints, in member order; all of one length."""
        rows: list[list[int]] = self._exchange(self._gather_ints, row)
        return rows

    def all_reduce(self, values: Sequence[int], how: Reduce) -> list[int]:
        """Return the element-wise reduction of every member's 64-bit values."""
        reduced: list[int] = self._exchange(self._reduce[how], values)
        return reduced

    def broadcast(self, root: int, payload: bytes) -> bytes:
        """Return the payload of member `root`; what the others pass is ignored."""
        if not 0 <= root < self.size:
            fault = f"member {root} of {self.size} cannot be a broadcast's root"
            raise self._pulse.fail(Failure(fault, ours=True)).error("")
        kind = self._broadcasts.get(root)
        if kind is None:
            kind = self._broadcasts[root] = self._kind(
                Operation.BROADCAST, root, reads=itemgetter(0), root=root
            )
        shared: bytes = self._exchange(kind, payload if root == self.index else b"")
        return shared

    def _kind(self, operation: Operation, detail: int = 0, **what: Any) -> _Kind:
        return _Kind(frame.tag(operation, detail, self._label), self.size, **what)

    def _exchange(self, kind: _Kind, given: Any) -> Any:
        """Run one exchange; whatever goes wrong in it stops all ranks, not this one alone."""
        sequence = self._sequence
        self._sequence = sequence + 1
        pulse = self._pulse
        if pulse.failure is not None:
            entered = frame.describe(kind.tag, sequence)
            raise pulse.failure.error(f"rank {self._rank} entered {entered}")
        pulse.awaited = self._rank
        pulse.exchange = kind.tag, sequence
        try:
            part = given if kind.packs is None else kind.packs(given)
            if len(part) > self._limit:
                raise InvariantError(
                    f"rank {self._rank} gave {len(part)} bytes to "
                    f"{frame.describe(kind.tag, sequence)}; "
                    f"an exchange takes at most {self._limit}"
                )
            centre = self._centre
            if kind.root is not None:
                parts = self._shared(kind, sequence, part)
            elif self._peer is not None:
                parts = self._swapped(kind, sequence, part, self._peer)
            elif centre is None:
                parts = self._collected(kind, sequence, part)
            else:
                form = kind.sent
                if form.lengths[0] != len(part):
                    form = kind.sent = Form(kind.tag, (len(part),))
                pulse.awaited = centre.peer
                centre.send(form.pack(sequence, form.head, part))
                parts = centre.take(kind.came[0], sequence) or self._received(
                    centre, kind, sequence, 0, kind.count
                )
            return parts if kind.reads is None else kind.reads(parts)
        except (OSError, EOFError, InvariantError) as error:
            raise self._broken(kind, sequence, error) from None
        except BaseException as error:
            left = f"rank {self._rank} left {frame.describe(kind.tag, sequence)}: {error!r}"
            pulse.fail(Failure(left))
            raise
        finally:
            pulse.exchange = None

    def _broken(self, kind: _Kind, sequence: int, error: Exception) -> DrumlineError:
        wait = Wait(self._pulse.awaited, (kind.tag, sequence))
        if isinstance(error, InvariantError):
            failure = self._pulse.fail(Failure(str(error), ours=True))
        else:
            failure = self._pulse.verdict(wait.rank, str(error) or "it ended")
        return failure.error(f"rank {self._rank} {wait}")

    # What is rarer, or of who has more to do.

    def _collected(self, kind: _Kind, sequence: int, part: bytes) -> list[bytes]:
        """Be the first member: return the answer's parts, once the others have it."""
        pulse = self._pulse
        parts = [part] * self.size
        # The last to be told an exchange's answer is the last to enter the next one: once its
        # part is here the others' are too, so waiting for it first is most often the only wait.
        for member, line in self._upward:
            pulse.awaited = line.peer
            came = line.take(kind.came[member], sequence) or self._received(
                line, kind, sequence, member, 1
            )
            parts[member] = came[0]
        if kind.answers is not None:
            parts = [kind.answers(parts)]
        self._spread(kind, sequence, parts)
        return parts

    def _spread(self, kind: _Kind, sequence: int, parts: list[bytes], besides: int = 0) -> None:
        """Give the others the answer, but for one member who has it."""
        lengths = tuple(map(len, parts))
        form = kind.sent
        if form.lengths != lengths:
            form = kind.sent = Form(kind.tag, lengths)
        whole = form.pack(sequence, form.head, *parts)
        pulse = self._pulse
        for member, line in self._downward:
            if member != besides:
                pulse.awaited = line.peer
                line.send(whole)

    def _swapped(self, kind: _Kind, sequence: int, part: bytes, peer: Line) -> list[bytes]:
        """Gather between two, who need no centre: neither waits for the other to answer.

        What the first member sends at once fits the line, which the other has emptied by the
        time it enters; something longer goes second, or both could be stuck sending.
        """
        self._pulse.awaited = peer.peer
        form = kind.sent
        if form.lengths[0] != len(part):
            form = kind.sent = Form(kind.tag, (len(part),))
        whole = form.pack(sequence, form.head, part)
        first = self.index == 1 or len(part) <= _AT_ONCE_BYTES
        if first:
            peer.send(whole)
        came = peer.take(kind.came[0], sequence) or self._received(peer, kind, sequence, 0, 1)
        if not first:
            peer.send(whole)
        parts = [*came, part] if self.index else [part, *came]
        return parts if kind.answers is None else [kind.answers(parts)]

    def _shared(self, kind: _Kind, sequence: int, part: bytes) -> list[bytes]:
        """Broadcast: return what the root gave, alone."""
        parts, root, centre = [part], kind.root or 0, self._centre
        if centre is None:
            if root:
                line = self._downward[root - 1][1]
                self._pulse.awaited = line.peer
                parts = line.take(kind.came[root], sequence) or self._received(
                    line, kind, sequence, root, 1
                )
            self._spread(kind, sequence, parts, root)
        elif self.index == root:
            self._pulse.awaited = centre.peer
            form = Form(kind.tag, (len(part),))
            centre.send(form.pack(sequence, form.head, part))
        else:
            self._pulse.awaited = centre.peer
            parts = centre.take(kind.came[0], sequence) or self._received(
                centre, kind, sequence, 0, 1
            )
        return parts

    def _received(
        self, line: Line, kind: _Kind, sequence: int, member: int, count: int
    ) -> list[bytes]:
        """Return the parts of a frame of another form than the last, or in pieces, or amiss."""
        parts = line.receive(kind.tag, sequence, count, count * (self._limit + _LENGTH_BYTES))
        kind.came[member] = Form(kind.tag, tuple(map(len, parts)))
        return parts


def _reduced(how: Reduce, parts: list[bytes]) -> bytes:
    return frame.packed(frame.reduced(frame.rows(parts), how))


def _row(parts: list[bytes]) -> list[int]:
    return frame.rows(parts)[0]

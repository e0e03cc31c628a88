"""A mesh of ranks over TCP, and the groups that exchange over it.

Every rank is connected with every other. A group is a star over its first member: the others
give it their part, it gives back the whole; two members just swap. All waits are plain blocking
reads; what ends one early is the pulse, which cuts the lines once the mesh has failed. A failed
mesh stays failed: ranks that are out of step, or one short, have nothing left to agree on.

It does not know what the bytes mean, nor which groups an engine needs.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from drumline.collective import frame, rendezvous
from drumline.collective.frame import Operation
from drumline.collective.line import Line
from drumline.collective.pulse import Failure, Pulse, Wait
from drumline.collective.settings import MeshSettings, Seat
from drumline.contract.ports import Clock, Reduce
from drumline.core.errors import DrumlineError, InvariantError

_PAIR = 2
_AT_ONCE_BYTES = 8 * 1024

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


def join(
    seat: Seat, settings: MeshSettings, clock: Clock, listener: socket.socket | None = None
) -> "Mesh":
    """Return this rank's end of the mesh, once every rank is connected with every other.

    `listener` may be given to rank 0: a socket that listens on the seat's address already.

    Collective: every rank. PeerError naming who is missing after `startup_timeout_s`;
    ConfigError for an address that is of no use. Thread: the mesh and its groups belong to the
    calling thread; `close` may be called by any.
    """
    links = rendezvous.connect(seat, settings, clock, listener)
    return Mesh(seat, links, settings, clock)


class Mesh:
    """One rank's end of a connected mesh. As a context, an exception tells the peers why."""

    def __init__(
        self, seat: Seat, links: rendezvous.Links, settings: MeshSettings, clock: Clock
    ) -> None:
        self._seat = seat
        self._settings = settings
        self._refused = links.refused
        self.host = links.host
        """The address of this machine that the other ranks reach."""
        self._lines = {
            rank: Line(seat.index, rank, connection) for rank, connection in links.lines.items()
        }
        self._labels: set[bytes] = set()
        self._pulse = Pulse(seat.index, links.pulses, settings, clock, self._cut)
        if seat.size > 1:
            self._pulse.start()

    @property
    def index(self) -> int:
        """This rank, from 0."""
        return self._seat.index

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._seat.size

    @property
    def refused(self) -> int:
        """Connections that were turned away during start-up, for being no rank's."""
        return self._refused

    @property
    def failure(self) -> str | None:
        """Why no exchange will succeed any more, once that is so. Thread: any."""
        failure = self._pulse.failure
        return failure.text if failure is not None else None

    def group(self, members: Sequence[int], name: str = "ranks") -> "MeshGroup":
        """Return the group of these ranks; the first is the centre of its exchanges.

        Every member must name the same ranks in the same order, and the same name. Nothing is
        exchanged. InvariantError when this rank is no member, or has this group already: two
        groups of the same ranks need two names, for their frames to differ.
        """
        frame.check_members(members, self.size)
        label = frame.label(name, members)
        if self.index not in members:
            raise InvariantError(f"rank {self.index} is no member of {label.decode()}")
        if label in self._labels:
            raise InvariantError(f"rank {self.index} has a group {label.decode()} already")
        self._labels.add(label)
        return MeshGroup(self.index, members, label, self._lines, self._pulse, self._settings)

    def fail(self, reason: str) -> None:
        """Stop every rank: their exchanges, also those they are in, raise PeerError."""
        self._pulse.fail(Failure(f"rank {self.index} stopped: {reason}"))

    def _cut(self) -> None:
        for line in self._lines.values():
            line.cut()

    def close(self) -> None:
        """Leave the mesh. A peer that needs this rank for an exchange later gets PeerError."""
        self._pulse.close()
        for line in self._lines.values():
            line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")
        self.close()


class MeshGroup:
    """A fixed set of a mesh's ranks that exchange in step: a `Group`.

    Every exchange raises PeerError when a rank of the mesh is gone, and InvariantError, with
    one text on all ranks, when the members are not in the same exchange or give what does not
    fit together.
    """

    __slots__ = (
        "_down_limit",
        "_downward",
        "_first",
        "_label",
        "_lines",
        "_members",
        "_pulse",
        "_rank",
        "_sequence",
        "_up_limit",
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
        settings: MeshSettings,
    ) -> None:
        self.index = members.index(rank)
        self.size = len(members)
        self._rank = rank
        self._members = tuple(members)
        self._label = label
        self._pulse = pulse
        self._sequence = 0
        self._first = members[0]
        leads = rank == self._first
        others = self._members[1:] if leads else ()
        self._lines = {r: lines[r] for r in (others if leads else members[:1])}
        self._downward = tuple((rank, lines[rank].send) for rank in others)
        # The last to be told an exchange's result is the last to enter the next one: once its
        # part is here the others' are too, so waiting for it first is most often the only wait.
        self._upward = tuple(
            (member, rank, lines[rank].receive)
            for member, rank in reversed(tuple(enumerate(others, 1)))
        )
        self._up_limit = settings.max_frame_bytes
        # What goes down may be every member's part, with their lengths.
        self._down_limit = self.size * (settings.max_frame_bytes + 8)

    def __repr__(self) -> str:
        return f"<{self._label.decode()}, member {self.index}, exchange {self._sequence}>"

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every member's payload, in member order."""
        return self._exchange(Operation.ALL_GATHER, 0, self._gather, payload)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Return every member's row of 64-bit ints, in member order; all of one length."""
        return self._exchange(Operation.ALL_GATHER_INTS, 0, self._gather_rows, row)

    def all_reduce(self, values: Sequence[int], how: Reduce) -> list[int]:
        """Return the element-wise reduction of every member's 64-bit values."""
        return self._exchange(
            Operation.ALL_REDUCE, frame.REDUCTIONS[how], self._reduce, (values, how)
        )

    def broadcast(self, root: int, payload: bytes) -> bytes:
        """Return the payload of member `root`; what the others pass is ignored."""
        return self._exchange(Operation.BROADCAST, root, self._share, (root, payload))

    def _exchange(
        self,
        operation: Operation,
        detail: int,
        star: Callable[[bytes, _Argument], _Result],
        argument: _Argument,
    ) -> _Result:
        """Run one exchange; whatever goes wrong in it stops all ranks, not this one alone."""
        exchange = frame.tag(operation, detail, self._sequence, self._label)
        self._sequence += 1
        pulse = self._pulse
        if pulse.failure is not None:
            raise pulse.failure.error(f"rank {self._rank} entered {frame.describe(exchange)}")
        pulse.awaited = self._rank
        pulse.exchange = exchange
        try:
            return star(exchange, argument)
        except (OSError, EOFError, InvariantError) as error:
            raise self._broken(exchange, error) from None
        except BaseException as error:
            text = f"rank {self._rank} left {frame.describe(exchange)}: {error!r}"
            self._pulse.fail(Failure(text))
            raise
        finally:
            pulse.exchange = None

    def _broken(self, exchange: bytes, error: Exception) -> DrumlineError:
        wait = Wait(self._pulse.awaited, exchange)
        if isinstance(error, InvariantError):
            failure = self._pulse.fail(Failure(str(error), ours=True))
        else:
            failure = self._pulse.verdict(wait.rank, str(error) or "it ended")
        return failure.error(f"rank {self._rank} {wait}")

    # What the first member does, and what the others do, in each kind of exchange.

    def _gather(self, exchange: bytes, payload: bytes) -> list[bytes]:
        if self.size == _PAIR:
            return self._swap(exchange, payload)
        if self.index == 0:
            payloads = self._collected(exchange, payload)
            self._spread(exchange, frame.joined(payloads))
            return payloads
        self._send(self._first, exchange, payload)
        return frame.split(self._received(self._first, exchange, self._down_limit), self.size)

    def _swap(self, exchange: bytes, payload: bytes) -> list[bytes]:
        """Gather between two, who need no centre: neither waits for the other to answer.

        What the first member sends at once fits the line, which the other has emptied by the
        time it enters; something longer goes second, or both could be stuck sending.
        """
        leads = self.index == 0
        peer = self._members[1 - self.index]
        first = not leads or len(payload) <= _AT_ONCE_BYTES
        if first:
            self._send(peer, exchange, payload)
        other = self._received(peer, exchange, self._up_limit)
        if not first:
            self._send(peer, exchange, payload)
        return [payload, other] if leads else [other, payload]

    def _gather_rows(self, exchange: bytes, row: Sequence[int]) -> list[list[int]]:
        return frame.rows(self._gather(exchange, frame.packed(row)))

    def _reduce(self, exchange: bytes, argument: tuple[Sequence[int], Reduce]) -> list[int]:
        values, how = argument
        own = frame.packed(values)
        if self.size == _PAIR:
            return frame.reduced(frame.rows(self._swap(exchange, own)), how)
        if self.index == 0:
            result = frame.reduced(frame.rows(self._collected(exchange, own)), how)
            self._spread(exchange, frame.packed(result))
            return result
        self._send(self._first, exchange, own)
        return frame.rows([self._received(self._first, exchange, self._up_limit)])[0]

    def _share(self, exchange: bytes, argument: tuple[int, bytes]) -> bytes:
        root, payload = argument
        if not 0 <= root < self.size:
            raise InvariantError(f"member {root} of {self.size} cannot be a broadcast's root")
        if self.index == 0:
            if root:
                payload = self._received(self._members[root], exchange, self._up_limit)
            self._check(exchange, payload)
            whole = frame.framed(exchange, payload)
            for rank, send in self._downward:
                if rank != self._members[root]:
                    self._pulse.awaited = rank
                    send(whole)
            return payload
        if self.index == root:
            self._send(self._first, exchange, payload)
            return payload
        return self._received(self._first, exchange, self._up_limit)

    def _collected(self, exchange: bytes, own: bytes) -> list[bytes]:
        self._check(exchange, own)
        payloads = [own] * self.size
        pulse, limit = self._pulse, self._up_limit
        for member, rank, receive in self._upward:
            pulse.awaited = rank
            payloads[member] = receive(exchange, limit)
        return payloads

    def _spread(self, exchange: bytes, body: bytes) -> None:
        whole = frame.framed(exchange, body)
        pulse = self._pulse
        for rank, send in self._downward:
            pulse.awaited = rank
            send(whole)

    def _send(self, rank: int, exchange: bytes, payload: bytes) -> None:
        self._check(exchange, payload)
        self._pulse.awaited = rank
        self._lines[rank].send(frame.framed(exchange, payload))

    def _received(self, rank: int, exchange: bytes, limit: int) -> bytes:
        self._pulse.awaited = rank
        return self._lines[rank].receive(exchange, limit)

    def _check(self, exchange: bytes, payload: bytes) -> None:
        if len(payload) > self._up_limit:
            raise InvariantError(
                f"rank {self._rank} gave {len(payload)} bytes to {frame.describe(exchange)}; "
                f"an exchange takes at most {self._up_limit}"
            )

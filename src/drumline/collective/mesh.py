"""A mesh of ranks over TCP: every rank is connected with every other.

A failed mesh stays failed: ranks that are out of step, or one short, have nothing left to agree
on. It does not know what is exchanged, nor which groups an engine needs.
"""

import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from drumline.collective import frame, rendezvous
from drumline.collective.group import MeshGroup
from drumline.collective.line import Line
from drumline.collective.pulse import Failure, Pulse
from drumline.collective.settings import MeshSettings, Seat
from drumline.contract.ports import Clock
from drumline.core.errors import InvariantError


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
        return MeshGroup(
            self.index, members, label, self._lines, self._pulse, self._settings.max_frame_bytes
        )

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

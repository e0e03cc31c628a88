"""How the ranks of a mesh find each other: everybody dials rank 0, then everybody below.

Rank 0's address is all that a rank is given. Each other rank dials it, says where it listens
itself, and gets the table of all addresses once every rank has come. Then each rank dials the
ranks below it (a line and a pulse each) and lets those above in; since nobody waits for a rank
above while it dials, the order cannot lock up. The ports are closed when all are connected.

It does not know what is exchanged later.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator

from msgspec import Struct

from drumline.collective.door import (
    Address,
    Door,
    Guest,
    Purpose,
    answer,
    hello,
    listen,
    parse_address,
    read_answer,
)
from drumline.collective.settings import MeshSettings, Seat
from drumline.contract.ports import Clock
from drumline.core.errors import DrumlineError, PeerError

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25
_DIAL_TIMEOUT_S = 5.0

_Wanted = set[tuple[Purpose, int]]


class Links(Struct):
    """A rank's connections to every other rank, and how many strangers were turned away."""

    lines: dict[int, socket.socket]
    pulses: dict[int, socket.socket]
    refused: int = 0
    host: str = ""
    """The address of this machine that the others reach."""

    def of(self, purpose: Purpose) -> dict[int, socket.socket]:
        """Return the connections of one purpose."""
        return self.lines if purpose is Purpose.LINE else self.pulses

    def close(self) -> None:
        """Give every socket back."""
        for connection in [*self.lines.values(), *self.pulses.values()]:
            connection.close()


def connect(
    seat: Seat, settings: MeshSettings, clock: Clock, listener: socket.socket | None = None
) -> Links:
    """Connect this rank with every other.

    `listener` is a socket that already listens on the seat's address, for rank 0 only.

    Collective: every rank of the mesh. Returns on each within `startup_timeout_s`, or raises
    PeerError that names who is missing; ConfigError when an address is of no use.
    """
    if seat.size == 1:
        if listener is not None:
            listener.close()
        return Links({}, {})
    meeting = _Meeting(seat, settings, clock)
    try:
        if seat.index == 0:
            meeting.host(listener)
        else:
            meeting.visit()
    except BaseException:
        meeting.links.close()
        raise
    return meeting.links


class _Meeting:
    """One rank's way through the start-up."""

    def __init__(self, seat: Seat, settings: MeshSettings, clock: Clock) -> None:
        self.links = Links({}, {})
        self._seat = seat
        self._settings = settings
        self._clock = clock
        self._start_us = clock.now_us()
        self._due_us = self._start_us + int(settings.startup_timeout_s * 1e6)
        self._report_us = self._start_us + int(settings.startup_report_s * 1e6)

    def host(self, listener: socket.socket | None) -> None:
        """Be rank 0: wait for all, hand out the table, take their pulses."""
        size = self._seat.size
        listener = listener or listen(parse_address(self._seat.address), size)
        self.links.host = listener.getsockname()[0]
        door = Door(listener, self._seat, self._settings, self._clock)
        with contextlib.closing(door):
            guests: dict[int, Guest] = {}
            try:
                for guest in self._gathered(door, {(Purpose.LINE, r) for r in range(1, size)}):
                    guests[guest.rank] = guest
            except DrumlineError as error:
                for connection in self.links.lines.values():
                    with contextlib.suppress(OSError):
                        answer(connection, False, str(error))
                raise
            table = "\n".join(str(guests[rank].address) for rank in range(1, size))
            for rank, guest in guests.items():
                self._answer(guest.connection, rank, table)
            for guest in self._gathered(door, {(Purpose.PULSE, r) for r in range(1, size)}):
                self._answer(guest.connection, guest.rank, "")

    def visit(self) -> None:
        """Be any other rank: join at rank 0, dial those below, let those above in."""
        index, size = self._seat.index, self._seat.size
        first = parse_address(self._seat.address)
        line = self._dial(0, first)
        self.links.lines[0] = line
        # The interface that reaches rank 0 is the one the others can reach.
        host = self.links.host = line.getsockname()[0]
        listener = listen(Address(host, 0), size)
        own = Address(host, listener.getsockname()[1])
        door = Door(listener, self._seat, self._settings, self._clock)
        with contextlib.closing(door):
            line.sendall(hello(self._seat, self._settings, Purpose.LINE, own))
            others = self._table(line)
            table = [first, *map(parse_address, others)]
            for rank in range(index):
                if rank:
                    self.links.lines[rank] = self._introduced(Purpose.LINE, rank, table, own)
                self.links.pulses[rank] = self._introduced(Purpose.PULSE, rank, table, own)
            for purpose in Purpose:
                for rank, connection in self.links.of(purpose).items():
                    door.watch(Guest(rank, purpose, connection, table[rank]))
            above = range(index + 1, size)
            wanted = {(purpose, rank) for purpose in Purpose for rank in above}
            for guest in self._gathered(door, wanted):
                self._answer(guest.connection, guest.rank, "")

    def _gathered(self, door: Door, wanted: _Wanted) -> Iterator[Guest]:
        """Let everybody in who is wanted, as they come, and keep their connections as links."""
        missing = wanted
        while missing:
            next_us = min(self._due_us, self._report_us) - self._clock.now_us()
            came, missing = door.admitted(wanted, max(next_us, 0))
            for guest in came:
                self.links.of(guest.purpose)[guest.rank] = guest.connection
                door.watch(guest)
                yield guest
            self.links.refused = door.refused
            if missing:
                who = self._seat.named({rank for _, rank in missing})
                self._check_time(f"ranks {who} are missing")

    def _table(self, line: socket.socket) -> list[str]:
        """Return every other rank's address, once rank 0 knows them all."""
        # Rank 0 gives up first, and says who is missing; its word must not come too late.
        self._due_us += int(_DIAL_TIMEOUT_S * 1e6)
        while True:
            next_us = min(self._due_us, self._report_us) - self._clock.now_us()
            line.settimeout(max(next_us, 1000) / 1e6)
            try:
                # Nothing is read before all of the answer may be waited for.
                line.recv(1, socket.MSG_PEEK)
                line.settimeout(_DIAL_TIMEOUT_S)
                table = read_answer(line, "rank 0").split("\n")
            except TimeoutError:
                self._check_time("rank 0 has not told where the others are")
                continue
            except OSError as error:
                raise PeerError(f"rank 0 went away during start-up: {error}") from None
            if len(table) != self._seat.size - 1:
                raise PeerError(f"rank 0 told of {len(table)} ranks besides itself")
            return table

    def _introduced(
        self, purpose: Purpose, rank: int, table: list[Address], own: Address
    ) -> socket.socket:
        """Return a connection to a rank below that it has accepted."""
        connection = self._dial(rank, table[rank])
        try:
            connection.settimeout(max(self._due_us - self._clock.now_us(), 1000) / 1e6)
            connection.sendall(hello(self._seat, self._settings, purpose, own))
            read_answer(connection, f"rank {rank}")
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise PeerError(f"rank {rank} did not answer during start-up: {error}") from None
            raise
        return connection

    def _dial(self, rank: int, address: Address) -> socket.socket:
        """Return a connection to where `rank` listens, or will listen soon."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                connection = socket.create_connection(
                    (address.host, address.port), timeout=_DIAL_TIMEOUT_S
                )
            except OSError as error:
                reason = str(error)
            else:
                # Dialling a free local port can, by chance, connect a socket with itself.
                if connection.getsockname() != connection.getpeername():
                    return connection
                connection.close()
                reason = "nobody listens"
            who = self._seat.named([rank])
            self._check_time(f"rank {who} cannot be reached at {address}: {reason}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _answer(self, connection: socket.socket, rank: int, text: str) -> None:
        try:
            connection.settimeout(_DIAL_TIMEOUT_S)
            answer(connection, True, text)
        except OSError as error:
            raise PeerError(f"rank {rank} went away during start-up: {error}") from None

    def _check_time(self, trouble: str) -> None:
        """Report what the start-up waits for, now and then; PeerError when its time is up."""
        now_us = self._clock.now_us()
        waited_s = (now_us - self._start_us) / 1e6
        if now_us >= self._due_us:
            raise PeerError(f"mesh start-up: after {waited_s:.1f} s, {trouble}")
        if now_us >= self._report_us:
            self._report_us = now_us + int(self._settings.startup_report_s * 1e6)
            _log.warning(
                "rank %d waits, for %.0f s by now: %s", self._seat.index, waited_s, trouble
            )

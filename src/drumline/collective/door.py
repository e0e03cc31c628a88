"""Who may connect: the hello a dialling rank says, and the door that checks it.

The port is open to whoever reaches it while a mesh starts. A connection that is no rank's, or
stays silent, is closed and counted; it never holds up a rank that comes behind it.

It does not know in which order ranks connect, nor what a connection is for later.
"""

import hashlib
import hmac
import logging
import selectors
import socket
import struct
from collections.abc import Collection
from enum import IntEnum

from msgspec import Struct

from drumline.collective.settings import MeshSettings, Seat
from drumline.contract.ports import Clock
from drumline.core.errors import ConfigError, PeerError

_log = logging.getLogger(__name__)

_MAGIC = b"DRUM"
_VERSION = 2
# Magic, version, purpose, index, size, beat in ms, digest of the token, listening port, host.
_HELLO = struct.Struct("<4sHBxIII32sH64s")
_ANSWER = struct.Struct("<?xxxI")
_LONGEST_ANSWER_BYTES = 4 * 1024 * 1024
_HELLO_TIMEOUT_S = 5.0
_MOST_STRANGERS = 256
_LAST_PORT = 65535


class Purpose(IntEnum):
    """What a connection between two ranks carries."""

    LINE = 1
    PULSE = 2


class Address(Struct, frozen=True):
    """Where a rank listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the address that `host:port` or `[v6]:port` names, else raise ConfigError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise ConfigError("mesh address", f"{text!r} is not host:port, such as 127.0.0.1:29500")
    return Address(host, int(port))


def listen(address: Address, size: int) -> socket.socket:
    """Return a socket that listens there for `size` ranks; ConfigError when it cannot."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        # Every rank may dial both of its connections before this one looks at the first.
        return socket.create_server(
            (address.host, address.port), family=family, backlog=2 * size + _MOST_STRANGERS
        )
    except OSError as error:
        raise ConfigError("mesh address", f"cannot listen on {address}: {error}") from None


def hello(seat: Seat, settings: MeshSettings, purpose: Purpose, own: Address) -> bytes:
    """Return what a rank says first on a connection that it dialled."""
    return _HELLO.pack(
        _MAGIC,
        _VERSION,
        purpose,
        seat.index,
        seat.size,
        int(settings.beat_s * 1000),
        _digest(seat.token),
        own.port,
        own.host.encode(),
    )


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def answer(connection: socket.socket, accepted: bool, text: str) -> None:
    """Answer a hello; OSError when the other end is gone. The socket must be blocking."""
    encoded = text.encode()
    connection.sendall(_ANSWER.pack(accepted, len(encoded)) + encoded)


def read_answer(connection: socket.socket, what: str) -> str:
    """Return the text of an accepting answer, within the socket's time-out.

    PeerError when the other end refuses or goes away; TimeoutError.
    """
    accepted, length = _ANSWER.unpack(_read(connection, _ANSWER.size, what))
    if length > _LONGEST_ANSWER_BYTES:
        raise PeerError(f"{what} answered with no mesh's answer")
    text = _read(connection, length, what).decode(errors="replace")
    if not accepted:
        raise PeerError(f"{what} refused: {text}")
    return text


def _read(connection: socket.socket, count: int, what: str) -> bytes:
    held = b""
    while len(held) < count:
        try:
            arrived = connection.recv(count - len(held))
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerError(f"{what} went away during start-up: {error}") from None
        if not arrived:
            raise PeerError(f"{what} went away during start-up")
        held += arrived
    return held


class Guest(Struct):
    """A rank's connection that was let in, and where that rank listens."""

    rank: int
    purpose: Purpose
    connection: socket.socket
    address: Address


class _Stranger:
    """A connection that has not said all of its hello."""

    __slots__ = ("connection", "due_us", "said")

    def __init__(self, connection: socket.socket, due_us: int) -> None:
        self.connection = connection
        self.due_us = due_us
        self.said = b""


class Door:
    """The listening end of one rank. It owns the listener; guests belong to the caller.

    `refused` counts the connections it turned away.
    """

    def __init__(
        self, listener: socket.socket, seat: Seat, settings: MeshSettings, clock: Clock
    ) -> None:
        self.refused = 0
        self._seat = seat
        self._settings = settings
        self._clock = clock
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._known: set[tuple[Purpose, int]] = set()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def watch(self, guest: Guest) -> None:
        """From now on, raise from `admitted` when this guest goes away."""
        self._selector.register(guest.connection, selectors.EVENT_READ, guest)

    def admitted(
        self, wanted: Collection[tuple[Purpose, int]], within_us: int
    ) -> tuple[list[Guest], set[tuple[Purpose, int]]]:
        """Wait up to `within_us` for guests; return those let in, and who is still missing.

        Guests are connected and blocking, and have not been answered. Returns as soon as one
        came in. PeerError when a watched guest went away.
        """
        until_us = self._clock.now_us() + within_us
        guests: list[Guest] = []
        while not guests:
            left_us = until_us - self._clock.now_us()
            if left_us <= 0:
                break
            for key, _ in self._selector.select(min(left_us / 1e6, 0.25)):
                if key.fileobj is self._listener:
                    self._open()
                elif isinstance(key.data, Guest):
                    self._look_after(key.data)
                elif isinstance(key.data, _Stranger):
                    guest = self._heard(key.data, wanted)
                    if guest is not None:
                        guests.append(guest)
            self._dismiss_the_silent()
        return guests, set(wanted) - self._known

    def _open(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it went away again, or descriptors ran out: others may be luckier
            return
        connection.setblocking(False)
        stranger = _Stranger(connection, self._clock.now_us() + int(_HELLO_TIMEOUT_S * 1e6))
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ, stranger)
        if len(self._strangers) > _MOST_STRANGERS + 2 * self._seat.size:
            self._turn_away(next(iter(self._strangers.values())), "too many say nothing")

    def _look_after(self, guest: Guest) -> None:
        try:
            alive = bool(guest.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except OSError:
            alive = False
        if not alive:
            raise PeerError(f"rank {guest.rank} went away during start-up")
        # It is ahead and sends already; what it sends is for later.
        self._selector.unregister(guest.connection)

    def _heard(self, stranger: _Stranger, wanted: Collection[tuple[Purpose, int]]) -> Guest | None:
        try:
            arrived = stranger.connection.recv(_HELLO.size - len(stranger.said))
        except BlockingIOError:
            return None
        except OSError:
            arrived = b""
        stranger.said += arrived
        if not arrived or not stranger.said.startswith(_MAGIC[: len(stranger.said)]):
            self._turn_away(stranger, "it is no rank of a mesh")
            return None
        if len(stranger.said) < _HELLO.size:
            return None
        fields = _HELLO.unpack(stranger.said)
        _, _, purpose, rank, _, _, _, port, host = fields
        problem = self._problem(fields, wanted)
        if problem is not None:
            self._turn_away(stranger, problem, tell=True)
            return None
        self._forget(stranger)
        stranger.connection.setblocking(True)
        self._known.add((Purpose(purpose), rank))
        address = Address(host.rstrip(b"\0").decode(errors="replace"), port)
        return Guest(rank, Purpose(purpose), stranger.connection, address)

    def _problem(
        self, fields: tuple[object, ...], wanted: Collection[tuple[Purpose, int]]
    ) -> str | None:
        """Return why a whole hello is refused, if it is."""
        _, version, purpose, rank, size, beat_ms, digest, _, _ = fields
        assert isinstance(digest, bytes)
        # The token first: a stranger learns nothing about this mesh.
        if not hmac.compare_digest(digest, _digest(self._seat.token)):
            return "the token is not this mesh's"
        own_ms = int(self._settings.beat_s * 1000)
        if version != _VERSION:
            return f"the hello has version {version}, this mesh {_VERSION}"
        if size != self._seat.size:
            return f"the hello is for {size} ranks, this mesh has {self._seat.size}"
        if beat_ms != own_ms:
            return f"the hello is for a beat every {beat_ms} ms, this mesh has {own_ms}"
        if (purpose, rank) in self._known:
            return f"rank {rank} is here already"
        if (purpose, rank) not in wanted:
            return f"rank {rank} has no business here now"
        return None

    def _turn_away(self, stranger: _Stranger, why: str, *, tell: bool = False) -> None:
        self.refused += 1
        try:
            name = str(stranger.connection.getpeername())
        except OSError:
            name = "somebody who is gone"
        _log.warning("rank %d turned %s away: %s", self._seat.index, name, why)
        self._forget(stranger)
        if tell:
            try:
                answer(stranger.connection, False, why)
            except OSError:
                _log.debug("%s did not wait for the reason", name)
        stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]

    def _dismiss_the_silent(self) -> None:
        now_us = self._clock.now_us()
        for stranger in [s for s in self._strangers.values() if s.due_us <= now_us]:
            self._turn_away(stranger, f"it said no hello within {_HELLO_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Close the port, and whoever has not said a hello yet."""
        for stranger in self._strangers.values():
            stranger.connection.close()
        self._selector.close()
        self._listener.close()

"""One connection to a peer that carries frames, read through one buffer.

It does not know groups or time: it blocks until a frame is there or the connection ends.
Whoever wants to end a wait cuts the line from another thread.
"""

import contextlib
import socket

from drumline.collective import frame
from drumline.core.errors import InvariantError

_READ_AHEAD_BYTES = 16 * 1024
_LENGTH_BYTES = frame.LENGTH.size
_length_at = frame.LENGTH.unpack_from


class Line:
    """Rank `index`'s connection to rank `peer`.

    Thread: `send` and `receive` belong to one thread; `cut` may be called by any.
    """

    __slots__ = ("_at", "_held", "_index", "_peer", "_recv", "_socket", "send")

    def __init__(self, index: int, peer: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._index = index
        self._peer = peer
        self._socket = connection
        # Looked up once: an exchange is little more than these calls.
        self._recv = connection.recv
        # What was read but not taken yet is `_held` from `_at` on.
        self._held = b""
        self._at = 0
        # Sends a whole frame; OSError when the connection is gone.
        self.send = connection.sendall

    def receive(self, exchange: bytes, limit: int) -> bytes:
        """Return the body of the next frame, which must carry tag `exchange`.

        InvariantError when it is another exchange's, or longer than `limit`; OSError or
        EOFError when the connection is gone.
        """
        if self._at == len(self._held):
            held = self._recv(_READ_AHEAD_BYTES)
            # Nearly always one read brings one frame, whole, and it is the right one.
            if held.startswith(exchange, _LENGTH_BYTES):
                body = held[_LENGTH_BYTES + len(exchange) :]
                if _length_at(held)[0] == len(body) <= limit:
                    return body
            if not held:
                raise EOFError
            self._held, self._at = held, 0
        return self._receive_pieces(exchange, limit)

    def _receive_pieces(self, exchange: bytes, limit: int) -> bytes:
        """Receive a frame that came in pieces, or with others, or is not the expected one."""
        head = self._take(frame.HEAD_BYTES)
        other = frame.tag_of(head, self._take(frame.label_bytes(head)))
        if other != exchange:
            # Both ends may find out at once; sorted, they say the same.
            here, there = sorted(((self._index, exchange), (self._peer, other)))
            raise InvariantError(
                f"rank {here[0]} is in {frame.describe(here[1])}, "
                f"but rank {there[0]} is in {frame.describe(there[1])}"
            )
        (length,) = _length_at(head)
        if length > limit:
            raise InvariantError(
                f"rank {self._peer} announced {length} bytes in {frame.describe(exchange)}; "
                f"rank {self._index} takes at most {limit}"
            )
        return self._take(length)

    def _take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        held = self._held[self._at : self._at + count]
        self._at += len(held)
        if len(held) == count:
            return held
        whole = bytearray(count)
        view = memoryview(whole)
        view[: len(held)] = held
        got = len(held)
        while count - got >= _READ_AHEAD_BYTES:
            arrived = self._socket.recv_into(view[got:])
            if not arrived:
                raise EOFError
            got += arrived
        while got < count:
            # The end may come with the next frame's beginning, which stays held.
            self._held = self._read()
            self._at = min(len(self._held), count - got)
            view[got : got + self._at] = self._held[: self._at]
            got += self._at
        return bytes(whole)

    def _read(self) -> bytes:
        arrived = self._recv(_READ_AHEAD_BYTES)
        if not arrived:
            raise EOFError
        return arrived

    def cut(self) -> None:
        """End the connection for both directions; a blocked send or receive returns at once.

        What arrived before can still be received.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

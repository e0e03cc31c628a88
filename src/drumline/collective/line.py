"""One connection to a peer that carries frames, read through one buffer.

It does not know groups or time: it blocks until a frame is there or the connection ends.
Whoever wants to end a wait cuts the line from another thread.
"""

import contextlib
import socket

from drumline.collective import frame
from drumline.collective.frame import Form
from drumline.core.errors import InvariantError

_READ_AHEAD_BYTES = 16 * 1024


class Line:
    """Rank `index`'s connection to rank `peer`.

    Thread: `send`, `take` and `receive` belong to one thread; `cut` may be called by any.
    """

    __slots__ = ("_buffer", "_end", "_index", "_recv_into", "_socket", "_start", "peer", "send")

    def __init__(self, index: int, peer: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._index = index
        self.peer = peer
        self._socket = connection
        # Looked up once: an exchange is little more than these calls.
        self._recv_into = connection.recv_into
        # What was read but not taken yet lies from `_start` to `_end`.
        self._buffer = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._start = self._end = 0
        # Sends a whole frame; OSError when the connection is gone.
        self.send = connection.sendall

    def take(self, form: Form, sequence: int) -> list[bytes] | None:
        """Return the parts of the next frame, if it has this form and number.

        Else, or where it is not here in one piece, None: `receive` takes it, or says what it is.
        OSError when the connection is gone.
        """
        start, end = self._start, self._end
        if start == end:
            start, end = 0, self._recv_into(self._buffer)
            self._end = end
        parts: list[bytes]
        if end - start >= form.size:
            number, head, *parts = form.unpack(self._buffer, start)
            if number == sequence and head == form.head:
                self._start = start + form.size
                return parts
        self._start = start
        return None

    def receive(self, tag: bytes, sequence: int, count: int, limit: int) -> list[bytes]:
        """Return the `count` parts of the next frame, which must carry this tag and number.

        InvariantError when it is another exchange's, or its body is longer than `limit`; OSError
        or EOFError when the connection is gone.
        """
        head = self._taken(frame.HEAD_BYTES)
        number, length, label_bytes = frame.front(head)
        other = frame.tag_of(head, self._taken(label_bytes))
        if (other, number) != (tag, sequence):
            # Both ends may find out at once; sorted, they say the same.
            here, there = sorted(((self._index, tag, sequence), (self.peer, other, number)))
            raise InvariantError(
                f"rank {here[0]} is in {frame.describe(*here[1:])}, "
                f"but rank {there[0]} is in {frame.describe(*there[1:])}"
            )
        if length > limit:
            raise InvariantError(
                f"rank {self.peer} announced {length} bytes in {frame.describe(tag, sequence)}; "
                f"rank {self._index} takes at most {limit}"
            )
        return frame.split(self._taken(length), count)

    def _taken(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        whole = bytearray(count)
        view = memoryview(whole)
        got = self._held(view)
        while got < count:
            if count - got >= _READ_AHEAD_BYTES:
                got += self._read(view[got:])
            else:
                # The end may come with the next frame's beginning, which stays held.
                self._start, self._end = 0, self._read(self._buffer)
                got += self._held(view[got:])
        return bytes(whole)

    def _held(self, out: memoryview) -> int:
        """Fill the beginning of `out` with what was read already; return how much that is."""
        count = min(len(out), self._end - self._start)
        out[:count] = self._buffer[self._start : self._start + count]
        self._start += count
        return count

    def _read(self, out: memoryview) -> int:
        arrived = self._recv_into(out)
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

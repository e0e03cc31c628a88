"""What a compile worker and the process that owns it say: one msgpack frame a message.

The worker is sent what it compiles for first, then grammars, one after the other; it
answers each before it is sent the next.
"""

import os
import select

import msgspec
from msgspec import Struct

from drumline.core.clock import SystemClock
from drumline.core.config import GrammarBackend
from drumline.core.errors import PeerError
from drumline.grammar.prepare import Prepared

_LENGTH_BYTES = 4
_CHUNK = 1 << 16


class Setting(Struct, frozen=True, tag="setting"):
    """What a worker compiles for."""

    backend: GrammarBackend
    pieces: tuple[bytes, ...]
    stop_ids: tuple[int, ...]


class Answer(Struct, frozen=True, tag="answer"):
    """What became of a message: nothing to tell, or why a grammar never compiles."""

    refused: str | None = None


Said = Setting | Prepared | Answer

_decoder = msgspec.msgpack.Decoder(Setting | Prepared | Answer)


class Link:
    """One side of the pipes between the two."""

    __slots__ = ("_clock", "_in", "_out")

    def __init__(self, receiving: int, sending: int) -> None:
        """Use two open descriptors, which stay the caller's."""
        self._in = receiving
        self._out = sending
        self._clock = SystemClock()

    def send(self, said: Said) -> None:
        """Write a message. Raises PeerError when the other side is gone."""
        payload = msgspec.msgpack.encode(said)
        data = memoryview(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError as error:
            raise PeerError(f"the other side of the pipe is gone: {error}") from None

    def receive(self, timeout_s: float | None = None) -> Said | None:
        """Return the next message; None when none came within `timeout_s`.

        Raises PeerError when the other side is gone, or says what is no message.
        """
        until = None if timeout_s is None else self._clock.now_us() + int(timeout_s * 1e6)
        head = self._read(_LENGTH_BYTES, until)
        body = head and self._read(int.from_bytes(head, "little"), until)
        if body is None:
            return None
        try:
            said: Said = _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise PeerError(f"the other side of the pipe sent no message: {error}") from None
        return said

    def _read(self, count: int, until_us: int | None) -> bytes | None:
        data = b""
        while len(data) < count:
            if until_us is not None:
                left_s = max(0, until_us - self._clock.now_us()) / 1e6
                if not select.select([self._in], [], [], left_s)[0]:
                    return None
            chunk = os.read(self._in, min(count - len(data), _CHUNK))
            if not chunk:
                raise PeerError("the other side of the pipe is gone")
            data += chunk
        return data

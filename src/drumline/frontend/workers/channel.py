"""One end of the socket pair between a worker and the owner of the engine's link."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from drumline.core.errors import DrumlineError, PeerError
from drumline.frontend.workers.messages import Answer, Asking, Failure

_HEAD_BYTES = 4

T = TypeVar("T")


class Channel(asyncio.Protocol, Generic[T]):
    """Messages in both directions, in order. Thread: the event loop's.

    `heard` is called with each message that is no answer to a question of this end.
    """

    def __init__(self, decode: Callable[[bytes], T | Answer], heard: Callable[[T], None]) -> None:
        self._decode = decode
        self._heard = heard
        self._encode = msgspec.msgpack.Encoder().encode
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._last_number = 0
        self.lost = asyncio.Event()
        """Set once the other end is gone."""
        self.writable = True
        """Whether the other end keeps up."""
        self.on_writable: Callable[[], None] = lambda: None

    async def attach(self, end: socket.socket) -> None:
        """Speak through `end`, which is this object's from now on."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=end)

    def send(self, message: Struct) -> None:
        """Send a message; does nothing once the other end is gone.

        Raises ValueError, OverflowError or RecursionError for values that no message can hold.
        """
        body = self._encode(message)
        if self._transport is not None and not self.lost.is_set():
            self._transport.write(len(body).to_bytes(_HEAD_BYTES, "big") + body)

    def number(self) -> int:
        """Return a number for a question."""
        self._last_number += 1
        return self._last_number

    async def ask(self, question: Any, number: int, timeout_s: float) -> Any:
        """Return the other end's answer.

        Raises the error that it answers with, and PeerError when it is gone or says nothing.
        """
        if self.lost.is_set():
            raise PeerError("the other process is gone")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self.send(Asking(number, question))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise PeerError(f"the other process did not answer within {timeout_s:g} s") from None
        finally:
            del self._asked[number]

    def answer(self, number: int, value: Any = None) -> None:
        """Answer a question of the other end."""
        self.send(Answer(number, value))

    def refuse(self, number: int, error: DrumlineError) -> None:
        """Answer a question of the other end with an error."""
        self.send(Answer(number, failure=Failure.of(error)))

    def close(self) -> None:
        """Close this end, behind what was sent."""
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream socket's

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(PeerError("the other process is gone"))

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self.on_writable()

    def data_received(self, data: bytes) -> None:
        unread = self._unread
        unread += data
        begin = 0
        while len(unread) - begin >= _HEAD_BYTES:
            body = begin + _HEAD_BYTES
            end = body + int.from_bytes(unread[begin:body], "big")
            if end > len(unread):
                break
            self._take(bytes(unread[body:end]))
            begin = end
        del unread[:begin]

    def _take(self, body: bytes) -> None:
        message = self._decode(body)
        if not isinstance(message, Answer):
            self._heard(message)
            return
        asked = self._asked.get(message.number)
        if asked is None or asked.done():
            return  # its asker has given up
        if message.failure is None:
            asked.set_result(message.value)
        else:
            asked.set_exception(message.failure.error())
